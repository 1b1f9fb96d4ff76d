"""Ray starts, restarts and ends the actors' processes; the workers in them are stand-ins."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.program import BOUND_S, Program, wait_until_gone

MODULE = "tests.process.supervised_run"

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def run(model_dir: Path) -> Iterator[Program]:
    started = Program(MODULE, str(model_dir), cwd=model_dir)
    yield started
    started.end()


SERVES = r"worker {} serves{} on \S+ \(pid (\d+), epoch (\w+)\)"


def test_a_dead_process_is_a_new_epoch_and_nothing_is_left(run: Program, model_dir: Path) -> None:
    workers = [SERVES.format(name, "") for name in ("prefill-0", "decode-0")]
    first, other = run.wait_for_all(workers)
    run.wait_for("all serve")
    assert first[1] != other[1]

    os.kill(int(first[1]), signal.SIGKILL)
    again = run.wait_for(SERVES.format("prefill-0", " again"))
    assert again[1] != first[1]
    assert again[2] != first[2]

    (model_dir / "fail-decode-0").touch()  # the worker inside fails, its process must follow
    other_again = run.wait_for(SERVES.format("decode-0", " again"))
    assert other_again[1] != other[1]
    assert other_again[2] != other[2]

    tree = run.tree()
    assert {int(again[1]), int(other_again[1])} <= {process.pid for process in tree}
    assert run.process.stdin is not None
    run.process.stdin.close()
    assert run.process.wait(BOUND_S) == 0
    wait_until_gone(tree)


def test_a_killed_driver_leaves_no_process(run: Program) -> None:
    run.wait_for("all serve")
    tree = run.tree()
    assert len(tree) > 3
    run.process.kill()
    wait_until_gone(tree)


def test_a_refused_checkpoint_is_one_sentence(model_dir: Path) -> None:
    (model_dir / "refuse-decode-0").touch()
    run = Program(MODULE, str(model_dir), cwd=model_dir)
    run.wait_for(r"^ConfigError: worker decode-0: model\.dir: this checkpoint is not to my taste$")
    assert run.process.wait(BOUND_S) == 2
