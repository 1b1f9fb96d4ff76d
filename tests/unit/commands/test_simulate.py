"""`disagg simulate` as a process."""

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.commands.simulate import _Load, read_curves
from disagg.commands.simulation_view import plot
from disagg.errors import ConfigError
from disagg.simulation.curves_file import curves_to_json
from disagg.simulation.figures import Slos, summarise
from disagg.simulation.mixes import Lengths
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import Outcome
from tests.unit.simulation.fleets import curves

ROOT = Path(__file__).parents[3]
LIGHT = ("--quiet", "--seconds", "3", "--scale", "0.05")


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg.commands", "simulate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def measured(tmp_path: Path) -> str:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps(curves_to_json(curves(), {})))
    return str(path)


def test_rates_policies_ratios_and_a_plot(measured: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = [tmp_path / name for name in ("one.svg", "two.SVG")]
    runs = [
        simulate(
            *("--curves", measured, "--mix", "short-chat", "--rate", "1,4", *LIGHT),
            *("--policy", "local,estimated", "--prefill", "2", "--decode", "1", "--ratios"),
            *("--plot", str(plot), "--json"),
        )
        for plot in plots
    ]
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * 2
    assert runs[0].stdout == runs[1].stdout
    assert plots[0].read_bytes() == plots[1].read_bytes()
    assert b"<svg" in plots[0].read_bytes()
    answer = json.loads(runs[0].stdout)
    assert answer["curves"] == "by hand"
    assert len(answer["runs"]) == 2 * 2 * 2  # rates, policies, splits of three workers
    assert {one["num_prefill"] + one["num_decode"] for one in answer["runs"]} == {3}
    best = answer["best_ratios"]
    assert [one["policy"] for one in best] == ["local", "estimated"] * 2
    for one in best:
        like = [
            each["goodput"]
            for each in answer["runs"]
            if (each["policy"], each["asked_rate"]) == (one["policy"], one["asked_rate"])
        ]
        assert one["goodput"] == max(like)


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        (("--both", "4"), (0, 0, 4)),
        (("--both", "4", "--prefill", "2"), (2, 0, 4)),
        (("--both", "4", "--set", "cluster.num_decode=1"), (0, 1, 4)),
        (("--set", "cluster.num_both=4"), (1, 1, 4)),  # as disagg serve takes it
        (("--both", "0"), (1, 1, 0)),
        ((), (1, 1, 0)),
    ],
)
def test_both_alone_is_the_whole_fleet(
    given: tuple[str, ...], workers: tuple[int, int, int], measured: str
) -> None:
    load = ("--mix", "short-chat", "--rate", "1", "--policy", "local", *LIGHT, "--json")
    run = simulate("--curves", measured, *load, *given)
    assert (run.returncode, run.stderr) == (0, "")
    (one,) = json.loads(run.stdout)["runs"]
    assert (one["num_prefill"], one["num_decode"], one["num_both"]) == workers


def test_several_routers_share_the_requests(measured: str) -> None:
    load = ("--curves", measured, "--mix", "long-documents", "--rate", "8", *LIGHT, "--json")
    fleet = ("--both", "4", "--policy", "prefix_then_load")
    given = {
        1: ("--routers", "1", "--set", "router.processes=3"),
        2: ("--routers", "2"),
        3: ("--set", "router.processes=3"),
    }
    found = []
    for num, arguments in given.items():
        run = simulate(*load, *fleet, *arguments)
        assert (run.returncode, run.stderr) == (0, "")
        answer = json.loads(run.stdout)
        assert answer["routers"] == num
        found.append(answer["runs"])
    assert found[0] != found[1] != found[2], "each sees less than one would"


def test_a_trace_and_the_table_for_people(measured: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * n, "input_length": 700, "output_length": 4, "hash_ids": [0, n + 1]}
        for n in range(6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = simulate(
        *("--curves", measured, "--trace", str(trace), "--policy", "prefix_then_load", "--quiet"),
        *("--prefill", "1", "--decode", "1", "--set", "scheduling.max_step_tokens=256"),
        *("--routers", "3"),
    )
    assert (run.returncode, run.stderr) == (0, "")
    (row,) = [line.split() for line in run.stdout.splitlines()[1:]]
    assert row[:6] == ["prefix_then_load", "1P1D", "3", "2", "2", "2"]  # 500 ms apart
    assert row[6] == "100.0%"
    assert "61%" in row  # five of six found 512 of 700 tokens


def test_what_fails_has_its_reason(measured: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 900, "output_length": 2, "hash_ids": [0, 1]}
    trace.write_text(f"{json.dumps(line)}\n")
    run = simulate(
        *("--curves", measured, "--trace", str(trace), "--policy", "local"),
        *("--set", "worker.num_blocks=12"),
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "1 context_length_exceeded" in run.stdout
    assert "context_length_exceeded: prompt and max_tokens need 902 tokens" in run.stdout


def test_progress_goes_to_the_other_stream(measured: str) -> None:
    run = simulate("--curves", measured, "--help")
    assert "--ratios" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mix", "short-chat"), "--rate"),
        (("--mix", "chat", "--rate", "1"), "no mix is named 'chat'; known: short-chat"),
        (("--rate", "1"), "give either --trace or --mix"),
        (("--mix", "short-chat", "--rate", "1,x"), "--rate: numbers are wanted"),
        (("--mix", "short-chat", "--rate", "0"), "--rate: above 0"),
        (("--trace", "once.jsonl", "--rate", "1"), "timestamp: all requests of the trace"),
        (("--mix", "short-chat", "--rate", "1", "--policy", "best"), "no policy is named 'best'"),
        (("--trace", "seconds.jsonl"), "requests per second by the trace's own times"),
        (
            ("--mix", "short-chat", "--rate", "1", "--set", "worker.num_blocks=2"),
            "worker.num_blocks: 2 are too few for any request: one token and its answer",
        ),
        (("--trace", "bad.jsonl"), "bad.jsonl, line 1: timestamp: "),
        (("--trace", "seconds.jsonl", "--scale", "1"), "--seconds, --scale: of a mix"),
        (("--trace", "seconds.jsonl", "--seconds", "60"), "--seconds, --scale: of a mix"),
        (("--trace", "missing.jsonl"), "missing.jsonl"),
        (("--mix", "short-chat", "--rate", "1", "--plot", "x.pdf", *LIGHT), ".svg or .png"),
        (("--mix", "short-chat", "--rate", "1", "--prefill", "5000"), "prefill"),
        (
            ("--mix", "short-chat", "--rate", "1", "--set", "worker.num_blocks=2147483648"),
            "2 workers of 2,147,483,648 blocks have more than",
        ),
        (("--trace", "packed.jsonl"), "is to be unpacked first, as by gzip -dc"),
        (("--mix", "short-chat", "--rate", "1", "--plot", "folder.svg"), "is a directory"),
        (("--mix", "short-chat", "--rate", "1", "--seed=-1"), "--seed"),
        (("--mix", "short-chat", "--rate", "1", "--slo-tpot-ms", "inf"), "router.slo_tpot_ms"),
    ],
)
def test_mistakes_end_with_one_line(
    measured: str, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": null}\n')
    line = {"timestamp": 5, "input_length": 9, "output_length": 2, "hash_ids": [0]}
    (tmp_path / "once.jsonl").write_text(2 * f"{json.dumps(line)}\n")
    later = line | {"timestamp": 5 + 1e-9}
    (tmp_path / "seconds.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(later)}\n")
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(b"{}\n"))
    (tmp_path / "folder.svg").mkdir()
    files = (".jsonl", ".pdf", ".svg")
    given = [str(tmp_path / one) if one.endswith(files) else one for one in arguments]
    run = simulate("--curves", measured, *given)
    assert run.returncode == 2, run.stdout
    assert said in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("option", ["--seconds", "--scale"])
def test_what_is_of_a_mix_is_refused_before_curves_are_read(tmp_path: Path, option: str) -> None:
    """As they may take long, and to say of them that they are missing would be beside the point."""
    run = simulate("--curves", str(tmp_path / "none.json"), "--trace", "t.jsonl", option, "1")
    assert run.returncode == 2
    assert "--seconds, --scale: of a mix" in run.stderr
    assert "none.json" not in run.stderr


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ([5] * 3, "all 3 requests of the trace come at once"),
        (
            [0, 1, 1],
            "read as ms, the trace has 2,000 requests per second in the mean; if they are "
            "seconds, give --rate 2",
        ),
        ([0, 500, 3_000], ""),
        ([7], ""),
    ],
)
def test_times_of_a_trace_that_are_doubtful_are_named(
    measured: str, tmp_path: Path, at: list[int], said: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 9, "output_length": 2, "hash_ids": [0]}
    trace.write_text("".join(f"{json.dumps(line | {'timestamp': one})}\n" for one in at))
    given = ("--curves", measured, "--trace", str(trace), "--policy", "local", "--quiet", "--json")
    run = simulate(*given)
    notes = json.loads(run.stdout)["notes"]
    assert run.stderr == "".join(f"disagg: {one}\n" for one in notes)
    assert len(notes) == bool(said)
    assert said in run.stderr
    stretched = simulate(*given, "--rate", "2") if len(set(at)) > 1 else None
    assert stretched is None or stretched.stderr == ""


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ("1,900000", "900000/s: more than 2,000,000 requests"),
        ("1,1e-9", "1e-09/s: no request comes within 60 s"),
    ],
)
def test_all_rates_are_looked_at_before_the_first_run(rates: str, said: str) -> None:
    load = _Load(None, "short-chat", 60, Lengths(8_192), 0)
    with pytest.raises(ConfigError, match=said):
        load.rates(rates)


def simulated(measured: str, *arguments: str) -> dict[str, Any]:
    load = ("--mix", "short-chat", "--rate", "4", *LIGHT, "--json")
    run = simulate("--curves", measured, *load, *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def test_settings_hold_where_no_flag_says_otherwise(measured: str) -> None:
    plain = simulated(measured, "--policy", "local")
    assert (plain["slo_ttft_ms"], plain["slo_tpot_ms"]) == (2_000, 100)
    bounds = ("--set", "router.slo_ttft_ms=1", "--set", "router.slo_tpot_ms=50")
    answer = simulated(measured, *bounds, "--set", "router.policy=cache_affinity")
    assert answer["not_simulated"] == []
    assert (answer["slo_ttft_ms"], answer["slo_tpot_ms"]) == (1, 50)
    assert {one["kept_share"] for one in answer["runs"]} == {0}
    known = ["estimated", "prefix_then_load", "local", "cache_affinity"]
    assert [one["policy"] for one in answer["runs"]] == known


@pytest.mark.parametrize(
    "given",
    [
        "worker.tiers=host?size=16MiB",
        "scheduling.num_speculative_tokens=4",
        "autoscale.decode=1-4",
    ],
)
def test_settings_that_are_not_simulated_are_named(measured: str, given: str) -> None:
    load = ("--curves", measured, "--mix", "short-chat", "--rate", "2", *LIGHT)
    run = simulate(*load, "--policy", "local", "--json", "--set", given)
    name = given.partition("=")[0]
    assert run.stderr == f"disagg: not simulated, as if not set: {name}\n"
    assert json.loads(run.stdout)["not_simulated"] == [name]


def test_a_fleet_of_both_roles_alone(measured: str) -> None:
    roles = ("--both", "2")
    (one,) = simulated(measured, "--policy", "local", *roles)["runs"]
    assert [one[f"num_{role}"] for role in ("prefill", "decode", "both")] == [0, 0, 2]


def test_what_is_named_twice_is_simulated_once(measured: str) -> None:
    assert len(simulated(measured, "--policy", "local,local", "--rate", "4,4")["runs"]) == 1


def test_a_trace_may_begin_with_a_byte_order_mark(measured: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}
    trace.write_bytes(b"\xef\xbb\xbf" + json.dumps(line).encode() + b"\r\n")
    run = simulate("--curves", measured, "--trace", str(trace), "--policy", "local", "--quiet")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_name_with_dollar_signs_is_a_title(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = summarise(
        [Outcome(TraceRequest(0, 1, 1, (0,)), 1, 1, 1)],
        Slos(9, 9),
        policy="local",
        workers=(1, 1, 0),
        asked_rate=2,
        lasts_s=1,
    )
    plot([found], tmp_path / "plot.svg", "model of $x^ and $y")
    assert "model of $x^ and $y" in (tmp_path / "plot.svg").read_text()


def test_figures_are_shown_where_the_plot_fails(measured: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load = ("--mix", "short-chat", "--rate", "4", *LIGHT, "--policy", "local")
    plot = tmp_path / "full.svg"
    plot.symlink_to("/dev/full")
    run = simulate("--curves", measured, *load, "--plot", str(plot))
    assert (run.returncode, run.stderr) == (
        2,
        f"disagg: --plot: {plot}: No space left on device\n",
    )
    assert "100.0%" in run.stdout


def test_curves_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"version": 3}')
    run = simulate("--curves", str(tmp_path / "c.json"), "--mix", "short-chat", "--rate", "1")
    assert run.returncode == 2
    assert "c.json: model: a JSON object is wanted" in run.stderr


def test_curves_of_any_size_are_read_in_part() -> None:
    with pytest.raises(ConfigError, match="more than 67,108,864 characters"):
        read_curves(Path("/dev/zero"))


def test_several_processes_say_the_same(measured: str) -> None:
    given = ("--curves", measured, "--mix", "short-chat", "--rate", "1,4", *LIGHT)
    alone, beside = (
        simulate(*given, "--prefill", "1", "--decode", "1", "--processes", number)
        for number in ("1", "3")
    )
    assert (beside.returncode, beside.stderr) == (0, "")
    assert beside.stdout == alone.stdout
    assert "prefix_then_load" in alone.stdout


def wait_until(state: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + 60
    while not state():
        assert time.monotonic() < ends_s, f"waited for {what}"
        time.sleep(0.01)


def children_of(pid: int) -> list[Path]:
    names = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path("/proc", name, "stat") for name in names]


def lives(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("num_children", [2, 3], ids=["begun", "running"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_stays_behind_one_that_ends(
    measured: str, number: signal.Signals, num_children: int
) -> None:
    """Neither where the first run's process has just been begun, nor where both run."""
    program = [sys.executable, "-m", "disagg.commands", "simulate", "--curves", measured]
    given = ("--mix", "short-chat", "--rate", "50,60", "--seconds", "600", "--processes", "2")
    with subprocess.Popen([*program, *given], cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        wait_until(lambda: len(children_of(run.pid)) >= num_children, "the runs' processes")
        children = children_of(run.pid)
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    if number is not signal.SIGKILL:
        assert (run.returncode, said) == (128 + number, "disagg: interrupted\n")
    wait_until(lambda: not any(map(lives, children)), "the processes' end")
