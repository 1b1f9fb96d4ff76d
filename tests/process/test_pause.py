"""A worker that stood still with READs in flight goes on: it judges nobody by that time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, Process, is_stopped, running, wait_until
from tests.process.network import Place
from tests.process.served_model import WINDOW, ServedModel, assert_exact, handed_over

pytestmark = pytest.mark.timeout(600)

STUCK_MS = 5_000
PAUSE_S = 7.0
"""Longer than that."""
NUM_BLOCKS = 240
"""So that one transfer is more than may be in quarantine: 25 blocks, of which 12 may be."""


def test_a_stopped_process_does_nothing() -> None:
    """Where `Process.stop` does not wait, threads run on behind it in about half of all stops."""
    threads = "import threading, time\ndef run():\n while True: time.sleep(0.0005)\n"
    threads += "for _ in range(6): threading.Thread(target=run).start()\nprint()\ntime.sleep(60)"
    stopped = object.__new__(Process)
    with subprocess.Popen(
        [sys.executable, "-c", threads], stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        one.stdout.readline()
        stopped.popen = one
        try:
            for _ in range(60):
                stopped.stop()
                assert is_stopped(one.pid)
                stopped.resume()
                wait_until(lambda: not is_stopped(one.pid), "it to go on")
        finally:
            one.kill()


def test_a_pause_with_reads_in_flight_costs_time_only(tmp_path: Path) -> None:
    """The owner stands still as well, and longer: so the READs are in flight when the reader wakes.

    Over TCP, where a READ needs its owner.
    """
    torch.set_num_threads(1)
    model_dir = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    here = Place(environment={"UCX_TLS": "tcp"})
    cluster = Cluster(
        model_dir,
        tmp_path,
        {"num_blocks": NUM_BLOCKS, "read_stuck_ms": STUCK_MS},
        {"worker_silent_ms": 60_000},  # the router gives neither up
        places={"p0": here, "d0": here},
    )
    with running(cluster, p0="prefill", d0="decode"):
        served = ServedModel(cluster)
        owner, reader = cluster.workers["p0"], cluster.workers["d0"]
        served.serve(served.prompt(150, salt="first"))  # they are connected
        expected = served.prompt(150)
        told = cluster.tell("d0", "hold reads")
        answer = served.ask_later(expected, "paused")
        cluster.wait_told("d0", "held reads", told)
        owner.stop()
        cluster.tell("d0", "pass reads")
        (inbound,) = cluster.status("d0").inbound
        assert inbound.num_reads_in_progress > 0
        reader.stop()
        time.sleep(PAUSE_S)  # this is the fault, not a wait
        reader.resume()
        (still,) = cluster.status("d0").inbound  # it has ticked since
        assert (still.state, still.num_reads_in_progress) == (
            inbound.state,
            inbound.num_reads_in_progress,
        )
        owner.resume()
        assert_exact(answer.result(60), expected)
        handed_over(cluster.record("paused"))
        cluster.wait_quiescent()
        assert cluster.living() == ["p0", "d0"]
