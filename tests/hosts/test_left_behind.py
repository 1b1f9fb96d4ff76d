"""Hosts end with the process that made them, however it ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from disagg.cluster.processes import ProcessId, find_descendants, is_alive, read_process
from tests.hosts.hosts import ROOT, hosts
from tests.hosts.namespaces import end_stale, find_stale

WAIT_S = 60.0

MAKE = """
import os, signal, sys
from pathlib import Path
from tests.hosts.hosts import hosts

how = sys.argv[2]
with hosts(2, Path(sys.argv[1])) as made:
    for host in made:
        host.run("trap '' TERM HUP INT; setsid nohup sleep 600 > /dev/null 2>&1 &")
    if how == "paused":
        made[1].pause()
    if how == "forked" and os.fork() == 0:
        signal.pause()  # holds what the hosts' first processes wait for
    print("made", flush=True)
    signal.pause()
"""


def wait_for(state: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not state():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextlib.contextmanager
def maker(keys: Path, how: str) -> Iterator[tuple["subprocess.Popen[str]", set[ProcessId]]]:
    """A process that has made hosts, and all that descend from it."""
    keys.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(keys), how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    found = read_process(process.pid)
    assert found is not None
    everything = find_descendants([found[0]])
    assert len(everything) > 2 * 4
    try:
        yield process, everything - {found[0]}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nothing_is_left_of_a_test_that_is_killed(tmp_path: Path) -> None:
    for how in ("plain", "paused"):
        with maker(tmp_path / how, how) as (process, everything):
            assert all(is_alive(each) for each in everything)
            process.kill()
            wait_for(lambda: not any(is_alive(each) for each in everything), f"{how}: left behind")


def test_what_is_left_behind_nevertheless_is_found_and_ended(tmp_path: Path) -> None:
    with maker(tmp_path / "keys", "forked") as (process, everything):
        assert find_stale() == set()
        end_stale()  # of a process that lives nothing is ended
        assert all(is_alive(each) for each in everything)
        process.kill()
        process.wait()
        wait_for(lambda: len(find_stale()) == 3, "the bridge and two hosts are stale")
        (holder,) = [each for each in everything if is_python(each)]
        end_stale()
        wait_for(
            lambda: not any(is_alive(each) for each in everything - {holder}), "still left behind"
        )
        os.kill(holder.pid, signal.SIGKILL)


def is_python(process: ProcessId) -> bool:
    with contextlib.suppress(OSError):
        return b"from tests.hosts" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return False


def test_making_hosts_ends_stale_ones(tmp_path: Path) -> None:
    with maker(tmp_path / "first", "forked") as (process, everything):
        process.kill()
        process.wait()
        wait_for(lambda: len(find_stale()) == 3, "the bridge and two hosts are stale")
        (tmp_path / "second").mkdir()
        with hosts(1, tmp_path / "second"):
            (holder,) = [each for each in everything if is_python(each)]
            wait_for(lambda: not any(is_alive(each) for each in everything - {holder}), "stale")
        os.kill(holder.pid, signal.SIGKILL)
