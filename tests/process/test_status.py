"""`disagg status` and the events behind the live page, with real workers and a held hand-over."""

import json
import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from disagg.commands.status_view import draw, fetch, is_well
from tests.process.harness import ROOT, Cluster, wait_until
from tests.process.served_model import ServedModel, assert_exact

pytestmark = pytest.mark.timeout(600)

BOUND_S = 60
NUM_PULLED = 5 * 3 + 10
"""Blocks that hand over 150 tokens: five window groups and a full one."""


def status(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disagg.commands", "status", "--url", cluster.admin_url]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def workers_of(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {worker["worker_id"]: worker for worker in body["workers"]}


def drawn(body: dict[str, Any]) -> list[str]:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(draw(body))
    return console.export_text().splitlines()


def test_a_held_hand_over_is_seen_without_a_certificate(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    told = cluster.tell("d0", "hold dones")
    answer = gemma3.ask_later(expected, "held-and-seen")
    cluster.wait_told("d0", "held dones", told)

    def all_is_offered() -> dict[str, Any] | None:
        found = fetch(cluster.admin_url, BOUND_S)
        leases = workers_of(found)["p0"]["leases"]
        return found if [one["num_blocks"] for one in leases] == [NUM_PULLED] else None

    body = wait_until(all_is_offered, "the offers of all steps of the prefill")
    workers = workers_of(body)
    (lease,), (inbound,) = workers["p0"]["leases"], workers["d0"]["inbound"]
    assert (lease["request_id"], lease["num_blocks"]) == ("held-and-seen", NUM_PULLED)
    assert lease["reader"] == {"worker_id": "d0", "epoch": cluster.epochs["d0"]}
    assert inbound["owner"]["worker_id"] == "p0"
    assert inbound["num_reads"] > 0
    assert workers["p0"]["version"] == body["router"]["version"]
    (listed,) = [one for one in body["requests"] if one["request_id"] == "held-and-seen"]
    assert (listed["prefill"], listed["decode"]) == ("p0", "d0")
    held = {group["kind"]: group["num_held"] for group in workers["d0"]["pool"]["groups"]}
    assert (held["full_attention"], held["sliding_window"]) == (10, 3)

    (row,) = [line.split() for line in drawn(body) if "p0 → d0" in line]
    assert row[3:7] == ["1", str(NUM_PULLED), "1", str(NUM_PULLED)]

    cluster.tell("d0", "pass dones")
    assert_exact(answer.result(BOUND_S), expected)
    cluster.wait_quiescent()

    done = status(cluster, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    workers = workers_of(json.loads(done.stdout))
    assert not any(worker["leases"] or worker["inbound"] for worker in workers.values())
    groups = workers["d0"]["pool"]["groups"]
    assert [group["num_held"] for group in groups] == [0] * len(groups)
    assert sum(group["num_cached"] for group in groups) > 0


def test_a_worker_that_does_not_answer_is_named(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster

    def what_is_wrong() -> dict[str, Any] | None:
        found = fetch(cluster.admin_url, BOUND_S)  # an answer of half a second ago is given again
        return None if is_well(found) else found

    cluster.workers["d0"].stop()
    try:
        body = wait_until(what_is_wrong, "a worker that does not answer")
    finally:
        cluster.workers["d0"].resume()
    workers = workers_of(body)
    assert workers["p0"]["answered"]
    assert not workers["d0"]["answered"]
    (line,) = [one for one in drawn(body) if "no answer: DEADLINE_EXCEEDED" in one]
    assert line.split()[0] == "d0"
    gemma3.restore()
