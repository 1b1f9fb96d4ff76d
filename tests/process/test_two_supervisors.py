"""Two supervisors of one Ray cluster: one is in charge, the other one stands by and takes over.

The workers in the actors are stand-ins; the tests are steps of one life and run in their order.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import wait_until
from tests.process.program import ROOT, Program
from tests.process.test_lasting_workers import BOUND_S, SERVES, epochs, said

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

STANDS_BY = r"^another supervisor is in charge \(.*, pid {}\); this one stands by"
LOST = r"^this supervisor is not in charge any more \(.*, pid {}\)$"
WORKERS = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Of the cluster, whose token is in the environment meanwhile."""
    ray = Program("tests.process.ray_main", str(folder), cwd=folder)
    try:
        found = ray.wait_for(r"^ray (\S+) (\w+)$", BOUND_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "token")
            patch.setenv("RAY_AUTH_TOKEN", found[2])
            yield found[1]
    finally:
        ray.end()


def lives(program: Program) -> dict[str, str]:
    """Last epoch of every worker, as far as the program has said."""
    found = [re.search(SERVES.format(r"(\S+)", "(?: again)?"), line) for line in program.lines]
    return {life[1]: life[3] for life in found if life is not None}


class Supervisors:
    """Those that run, in the order in which they started."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self._running: list[Program] = []

    def start(self, *changes: str) -> Program:
        arguments = (str(self.folder), self.address, *changes)
        program = Program("tests.process.lasting_run", *arguments, cwd=self.folder)
        self._running.append(program)
        return program

    def end(self) -> None:
        for program in self._running:
            program.process.send_signal(signal.SIGCONT)
            program.end()


@pytest.fixture(scope="module")
def supervisors(address: str, folder: Path) -> Iterator[Supervisors]:
    made = Supervisors(folder, address)
    yield made
    made.end()


@pytest.fixture(scope="module")
def first(supervisors: Supervisors) -> Program:
    return supervisors.start()


@pytest.fixture(scope="module")
def before(first: Program) -> dict[str, str]:
    return epochs(first, *WORKERS)


@pytest.fixture(scope="module")
def second(supervisors: Supervisors, first: Program, before: dict[str, str]) -> Program:
    started = supervisors.start()
    started.wait_for(STANDS_BY.format(first.process.pid), BOUND_S)
    return started


@pytest.fixture(scope="module")
def third(supervisors: Supervisors, second: Program) -> Program:
    """Starts when the second one is in charge."""
    assert said(second, "^in charge as supervisor 2 of this cluster$")
    started = supervisors.start()
    started.wait_for(STANDS_BY.format(second.process.pid), BOUND_S)
    return started


def test_who_stands_by_touches_nothing_and_takes_over_when_the_other_is_killed(
    first: Program, before: dict[str, str], second: Program
) -> None:
    # It has its own way to find out that a worker has ended, and leaves that to the other one.
    lines = said(first, SERVES.format("decode-0", ""))
    os.kill(int(lines[0].partition("pid ")[2].split(",")[0]), signal.SIGKILL)
    again = first.wait_for(SERVES.format("decode-0", " again"), BOUND_S)[2]
    first.wait_for("^all workers serve$", BOUND_S)
    assert not said(second, "worker")
    first.process.kill()
    after = epochs(second, *WORKERS)
    assert after == before | {"decode-0": again}
    assert not said(second, "starting workers|leaves|ended")


def test_who_stood_still_is_followed_and_notices_before_it_does_anything(
    second: Program, third: Program
) -> None:
    before = lives(second)
    second.process.send_signal(signal.SIGSTOP)
    third.wait_for("^in charge as supervisor 3 of this cluster$", BOUND_S)
    assert epochs(third, *WORKERS) == before
    # A worker ends and is started again meanwhile: whoever goes on knows of it, and does nothing.
    (pid,) = {line.partition("pid ")[2].split(",")[0] for line in said(third, "decode-0 serves")}
    os.kill(int(pid), signal.SIGKILL)
    again = third.wait_for(SERVES.format("decode-0", " again"), BOUND_S)[2]
    third.wait_for("^all workers serve$", BOUND_S)
    num_lines = len(second.lines)
    second.process.send_signal(signal.SIGCONT)
    second.wait_for(LOST.format(third.process.pid), BOUND_S)
    second.wait_for(STANDS_BY.format(third.process.pid), BOUND_S)
    assert not [line for line in second.lines[num_lines:] if line.startswith("worker")]
    third.process.kill()
    second.wait_for("^in charge as supervisor 4 of this cluster$", BOUND_S)
    assert epochs(second, *WORKERS) == before | {"decode-0": again}
    assert not said(third, "(?<!decode-0) serves again")


def test_other_settings_of_who_stands_by_change_nothing(
    supervisors: Supervisors, second: Program
) -> None:
    other = supervisors.start("worker.num_blocks=77")
    other.wait_for(STANDS_BY.format(second.process.pid), BOUND_S)
    num_lines = len(second.lines)
    # Control: one that asks nobody replaces workers that another one has just started.
    asks_nobody = supervisors.start("asks-nobody", "worker.num_blocks=78")
    asks_nobody.wait_for("has new settings, it leaves$", BOUND_S)
    asks_nobody.end()
    second.wait_for("serves again", BOUND_S)
    second.wait_for("^all workers serve$", BOUND_S)
    assert len(second.lines) > num_lines
    assert not said(other, "^worker")
    other.end()


def test_who_ends_in_order_is_followed_at_once(supervisors: Supervisors, second: Program) -> None:
    fourth = supervisors.start()
    fourth.wait_for(STANDS_BY.format(second.process.pid), BOUND_S)
    assert second.process.stdin is not None
    second.process.stdin.close()
    assert second.process.wait(BOUND_S) == 0
    fourth.wait_for("^in charge as supervisor 5 of this cluster$", BOUND_S)
    epochs(fourth, *WORKERS)
    assert not said(fourth, "starting workers|leaves|ended")

    # All workers are ended by hand only when nobody would start them again.
    code, said_there = end_workers(supervisors)
    assert code == 2
    assert f"pid {fourth.process.pid}): stop it first" in said_there
    assert fourth.process.stdin is not None
    fourth.process.stdin.close()
    assert fourth.process.wait(BOUND_S) == 0
    pids = {int(pid) for pid in re.findall(r"serves.* \(pid (\d+),", "\n".join(fourth.lines))}
    assert len(pids) == 2
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    code, said_there = end_workers(supervisors)
    assert code == 0, said_there
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "ends", BOUND_S)


def end_workers(supervisors: Supervisors) -> tuple[int, str]:
    """`disagg workers --end`: its exit code and what it said.

    It knows neither model nor secret, which a `disagg serve` may have made for its own run.
    """
    command = [sys.executable, "-m", "disagg.commands", "workers", "--end"]
    ended = subprocess.run(
        [*command, "--ray-address", supervisors.address],
        cwd=supervisors.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    return ended.returncode, ended.stdout
