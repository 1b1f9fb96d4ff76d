"""Ray's autoscaler makes a host for a worker that finds no place, and takes it away when it idles.

A real autoscaler; its provider is Ray's own for tests, whose hosts are raylets of this machine. The
workers are stand-ins.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg.cluster.processes import end_processes
from disagg.cluster.run_folder import RunFolder
from tests.process.autoscaling_ray import ADDRESS, autoscaling_head
from tests.process.program import ROOT, Program

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

BOUND_S = 500.0
ENVIRONMENT = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
COUNT = """
import ray
ray.init(address="{address}", logging_level="ERROR")
alive = [one for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU")]
print("hosts", len(alive))
"""


def num_hosts() -> int:
    """Hosts that live and may have workers."""
    command = [sys.executable, "-c", COUNT.format(address=ADDRESS)]
    said = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=BOUND_S, check=True
    ).stdout
    found = re.search(r"^hosts (\d+)$", said, re.MULTILINE)  # among what Ray says
    assert found is not None, said
    return int(found[1])


def wait_for(state: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not state():
        assert time.monotonic() < deadline, what
        time.sleep(1)


def scale(*arguments: str) -> None:
    command = [sys.executable, "-m", "disagg.commands", "scale", "--ray-address", ADDRESS]
    subprocess.run([*command, *arguments], env=ENVIRONMENT, check=True, timeout=BOUND_S)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "config.json").write_text("{}")
    folder = RunFolder()  # its path is short: sockets lie in it
    head = autoscaling_head(tmp_path, folder.path / "ray", hosts_max=3)
    running = [head]
    try:
        head.wait_for("Ray runtime started", BOUND_S)
        changes = ("cluster.num_prefill=1", "cluster.num_decode=0", "cluster.num_cpus_per_worker=1")
        arguments = (str(tmp_path), ADDRESS, *changes)
        module = "tests.process.lasting_run"
        running.append(Program(module, *arguments, cwd=tmp_path, environment=ENVIRONMENT))
        yield running[-1]
    finally:
        for program in running[1:]:
            program.end()
        tree = head.tree()  # with the hosts, which the autoscaler started
        head.process.terminate()
        end_processes(tree, BOUND_S / 10)
        folder.remove()


def test_hosts_come_for_workers_and_go_with_them(supervisor: Program) -> None:
    supervisor.wait_for(r"^worker prefill-0: finds no place", BOUND_S)
    supervisor.wait_for("^all workers serve$", BOUND_S)
    assert num_hosts() == 1

    scale("--decode", "1", "--no-wait")
    supervisor.wait_for(r"^worker decode-0: finds no place: it needs CPU 1 on one host", BOUND_S)
    supervisor.wait_for("^all workers serve$", BOUND_S)
    assert num_hosts() == 2

    scale("--decode", "0", "--no-wait")
    supervisor.wait_for("^worker decode-0 has ended$", BOUND_S)
    wait_for(lambda: num_hosts() == 1, "the host that has nothing to do goes")
    assert not [line for line in supervisor.lines if "prefill-0 serves again" in line]
