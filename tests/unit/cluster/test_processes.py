"""A child ends with the process that started it, also where that went before it could say so."""

import os
import signal
import subprocess
import sys

import pytest

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
