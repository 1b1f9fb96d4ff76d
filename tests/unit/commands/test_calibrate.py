"""`disagg calibrate` on a tiny checkpoint: what it writes can be simulated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.commands.calibrate import ERROR_MAX, check_errors
from disagg.commands.measured_links import link_fit
from disagg.commands.rounds import rounds
from disagg.commands.simulate import read_curves
from disagg.errors import ConfigError
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import World
from tests.checkpoints import make_checkpoint
from tests.unit.simulation.fleets import fleet, with_curves

ROOT = Path(__file__).parents[3]
SMALL = (
    *("--repeats", "1", "--error-max", "1e9"),  # tests run beside others
    *("--set", "worker.engine=native", "--set", "worker.device=cpu"),
    *("--set", "worker.num_blocks=256", "--set", "scheduling.max_sequences=4"),
    *("--set", "scheduling.max_step_tokens=64", "--set", "scheduling.max_model_tokens=512"),
)


def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg.commands", "calibrate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_a_tiny_model_is_measured(tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "tiny", tmp_path / "curves.json"
    make_checkpoint(checkpoint, "gemma3")
    run = calibrate("--model", str(checkpoint), "--out", str(out), *SMALL)
    assert run.returncode == 0, run.stderr
    assert "decode of 1 to 4 sequences: 1 of 1" in run.stderr
    assert "READs between two processes" in run.stderr
    measured = json.loads(out.read_text())["measured"]
    assert measured["max_step_tokens"] == 64
    assert set(measured["errors"]) == {"prefill", "decode", "mixed", "read", "linear"}
    assert [one["bytes"] for one in measured["reads"]] == sorted(
        {one["bytes"] for one in measured["reads"]}
    )
    curves = read_curves(out)
    assert curves.prefill.across[-1] == 64
    assert curves.decode.across == (1, 2, 4)
    assert min(map(min, (*curves.prefill.ms, *curves.decode.ms))) > 0
    assert curves.hop_ms > 0
    assert min(one["ms"] for one in measured["reads"]) > 0
    plan = with_curves(fleet(), **{name: getattr(curves, name) for name in ("prefill", "decode")})
    (outcome,) = World(plan).run([TraceRequest(0, 200, 4, (0,))])
    assert outcome.finished


def test_curves_that_do_not_say_what_was_measured_are_refused() -> None:
    good = {"prefill": 0.05, "decode": 0.1, "mixed": None, "read": 0.4, "linear": 9.0}
    check_errors(good, ERROR_MAX)
    busy = good | {"mixed": 6.8314, "decode": 0.93}
    with pytest.raises(
        ConfigError, match="steps that decode by 93%, of steps of both by 683%"
    ) as said:
        check_errors(busy, ERROR_MAX)
    for words in ("load average", "--repeats", "--error-max 6.9"):
        assert words in said.value.message
    check_errors(busy, 6.9)


def test_a_busy_machine_writes_no_file(tmp_path: Path) -> None:
    """No machine is as quiet as this bound wants it."""
    checkpoint, out = tmp_path / "tiny", tmp_path / "curves.json"
    make_checkpoint(checkpoint, "gemma3")
    run = calibrate("--model", str(checkpoint), "--out", str(out), *SMALL, "--error-max", "0")
    assert run.returncode == 2
    assert "disagg: no curves are written: they are off what was measured" in run.stderr
    assert not out.exists()


def test_what_is_left_of_the_repeats_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 10.0, 24.0))
    monkeypatch.setattr("disagg.commands.rounds.time.perf_counter", lambda: next(clock))
    said: list[str] = []
    assert list(rounds("prefill", 3, said.append)) == [0, 1, 2]
    assert said == ["prefill: 1 of 3", "prefill: 2 of 3, 20 s left", "prefill: 3 of 3, 12 s left"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "x.json"), "model.dir"),
        (("--model", "nowhere", "--out", "x.json"), "config.json"),
    ],
)
def test_mistakes_end_with_one_line(arguments: tuple[str, ...], said: str) -> None:
    run = calibrate(*arguments)
    assert run.returncode == 2
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_a_links_two_parts_are_found() -> None:
    points = [(num, 0.4 + 0.25 * num / (1 << 20)) for num in (1 << 16, 1 << 20, 1 << 24, 1 << 26)]
    found = link_fit(points)
    assert found.read_ms == pytest.approx(0.4, rel=0.01)
    assert found.mib_ms == pytest.approx(0.25, rel=0.01)


def test_an_admin_port_is_of_a_fleet() -> None:
    run = calibrate("--model", "nowhere", "--out", "x.json", "--admin", "http://127.0.0.1:8001")
    assert run.returncode == 2
    assert "--fleet" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "."), "--out: . is a directory"),
        (("--out", "x.json", "--fleet", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
    ],
)
def test_what_cannot_go_well_is_known_before_it_measures(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = calibrate("--model", str(tmp_path), *arguments)
    assert run.returncode == 2
    assert said in run.stderr
    assert "calibrate: imports" not in run.stderr
