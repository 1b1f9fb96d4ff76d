"""`disagg calibrate` on a tiny checkpoint: what it writes can be simulated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.commands.measured_links import link_fit
from disagg.commands.simulate import read_curves
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import World
from tests.checkpoints import make_checkpoint
from tests.unit.simulation.fleets import fleet, with_curves

ROOT = Path(__file__).parents[3]
SMALL = (
    *("--repeats", "1", "--set", "worker.engine=native", "--set", "worker.device=cpu"),
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
    assert "decode of 1 to 4 sequences" in run.stderr
    assert "READs between two processes" in run.stderr
    measured = json.loads(out.read_text())["measured"]
    assert measured["max_step_tokens"] == 64
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
