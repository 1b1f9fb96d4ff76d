"""`disagg leases` against real workers: what a held hand-over looks like from outside."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.process.harness import ROOT, Cluster
from tests.process.served_model import ServedModel, assert_exact

pytestmark = pytest.mark.timeout(600)

BOUND_S = 60
NUM_PULLED = 5 * 3 + 10
"""Blocks that hand over 150 tokens: five window groups and a full one."""


def leases(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "disagg.commands",
        "leases",
        "--url",
        cluster.admin_url,
        "--tls-directory",
        cluster.tls_directory,
        *arguments,
    ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False
    )


def workers(cluster: Cluster, *arguments: str) -> tuple[dict[str, dict[str, Any]], int]:
    done = leases(cluster, "--json", *arguments)
    assert done.stdout, done.stderr
    shown = json.loads(done.stdout)["workers"]
    return {worker["worker_id"]: worker for worker in shown}, done.returncode


def test_a_held_hand_over_is_seen_from_outside(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    told = cluster.tell("d0", "hold dones")
    answer = gemma3.ask_later(expected, "held")
    cluster.wait_told("d0", "held dones", told)

    seen, code = workers(cluster)
    assert code == 0
    (lease,), (inbound,) = seen["p0"]["leases"], seen["d0"]["inbound"]
    name = lease["request"]
    assert name.startswith("held#")  # and the generation, which counts over all requests
    assert (lease["state"], lease["num_blocks"]) == ("SEALED", NUM_PULLED)
    assert lease["reader"] == {"worker_id": "d0", "epoch": cluster.epochs["d0"]}
    assert (inbound["request"], inbound["num_blocks"]) == (name, NUM_PULLED)
    assert inbound["owner"] == {"worker_id": "p0", "epoch": cluster.epochs["p0"]}
    assert inbound["num_reads_in_progress"] > 0
    assert (seen["d0"]["num_reservations"], seen["d0"]["num_blocks_quarantined"]) == (1, 0)
    assert seen["p0"]["num_blocks_usable"] - seen["p0"]["num_blocks_free"] == NUM_PULLED

    table = leases(cluster)
    assert table.returncode == 0
    (row,) = [line.split() for line in table.stdout.splitlines() if "SEALED" in line]
    assert row == ["p0", str(lease["lease_id"]), name, *row[3:4], "SEALED", str(NUM_PULLED)]
    assert row[3].startswith("d0:")

    cluster.tell("d0", "pass dones")
    assert_exact(answer.result(BOUND_S), expected)
    cluster.wait_quiescent()
    seen, code = workers(cluster)
    assert code == 0
    assert not any(worker["leases"] or worker["inbound"] for worker in seen.values())
    assert "no leases" in leases(cluster).stdout


def test_a_worker_that_does_not_answer_is_shown_as_such(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster
    stopped = cluster.workers["d0"].popen.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as beside:  # each waits for as long
            shown = beside.submit(leases, cluster, "--timeout", "5")
            seen, code = workers(cluster, "--timeout", "5")
            table = shown.result()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert code == table.returncode == 1
    assert seen["p0"]["answered"]
    assert not seen["d0"]["answered"]
    assert "DEADLINE_EXCEEDED" in seen["d0"]["error"]
    assert any("d0" in line and "no answer" in line for line in table.stdout.splitlines())


def test_watching_goes_on_until_interrupted(gemma3: ServedModel) -> None:
    command = [
        sys.executable,
        "-m",
        "disagg.commands",
        "leases",
        "--url",
        gemma3.cluster.admin_url,
    ]
    command += ["--tls-directory", gemma3.cluster.tls_directory]
    with subprocess.Popen(
        [*command, "--json", "--watch"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as watching:
        try:
            assert watching.stdout is not None
            for _ in range(2):
                assert len(json.loads(watching.stdout.readline())["workers"]) == 2
            watching.send_signal(signal.SIGINT)
            assert watching.wait(BOUND_S) == 0
        finally:
            watching.kill()
