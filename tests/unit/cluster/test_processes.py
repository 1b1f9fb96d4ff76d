"""Children that end with who started them, and descendants that are found when that one ended."""

import os
import signal
import subprocess
import sys

import pytest

from disagg.cluster.processes import exit_code, read_process

STAYS = """
import sys
from disagg.cluster.processes import end_with_parent
end_with_parent(int(sys.argv[1]))
print("stays", flush=True)
sys.stdin.read()
"""
STARTS_ONE = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
sys.stdin.read(1)
"""


def start(parent: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STAYS, str(parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
def test_who_finds_another_parent_ends_at_once() -> None:
    with start(1 if os.getpid() != 1 else 2) as child:
        assert child.wait(100) == -signal.SIGTERM
    with start(os.getpid()) as child:  # the control
        assert child.stdout is not None
        assert child.stdout.readline() == "stays\n"
        assert child.poll() is None
        child.communicate()


@pytest.mark.timeout(120)
def test_who_loses_its_parent_ends() -> None:
    command = [sys.executable, "-c", STARTS_ONE, STAYS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "stays\n"
        parent.kill()
        assert parent.stdout.read() == "", "whose end closes the pipe"


ADOPTS = """
import os, signal, subprocess, sys, time
from disagg.cluster.processes import adopt_orphans, find_children, find_descendants, reap_orphans
if sys.argv[1] == "adopts":
    adopt_orphans()
own = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
pid = int(own.stdout.readline())
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)  # who has started it has ended
print(pid in {one.pid for one in find_descendants(find_children(os.getpid()))}, flush=True)
os.kill(pid, signal.SIGKILL)
reap_orphans({own.pid})
print(own.wait(), flush=True)
end_s = time.monotonic() + 60
while os.path.exists(f"/proc/{pid}") and time.monotonic() < end_s:
    reap_orphans(())
    time.sleep(0.01)
print(os.path.exists(f"/proc/{pid}"))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["adopts", "control"])
def test_an_orphan_is_found_and_leaves_nothing(how: str) -> None:
    command = [sys.executable, "-c", ADOPTS, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.split() == [str(how == "adopts"), "0", "False"], run


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ends", "code"), [("exit 3", 3), ("kill -9 $$", -signal.SIGKILL)])
def test_how_a_child_has_ended_can_be_asked_before_who_started_it_does(
    ends: str, code: int
) -> None:
    with subprocess.Popen(["sh", "-c", f"read x; {ends}"], stdin=subprocess.PIPE) as child:
        found = read_process(child.pid)
        assert found is not None
        assert exit_code(found[0]) is None, "it runs"
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code(found[0]) == code
        assert child.wait() == code
        assert exit_code(found[0]) is None, "it was asked for"
