"""A worker whose transport broke heals, or is not there any more; it never stays and fails."""

import re
from functools import partial

import pytest

from tests.process.harness import wait_until
from tests.process.served_model import ServedModel, assert_exact, is_exact

pytestmark = pytest.mark.timeout(600)


def test_a_worker_that_can_read_from_nobody_ends_and_its_next_life_reads(
    gemma3: ServedModel,
) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    process, old = cluster.workers["d0"], cluster.epochs["d0"]
    cluster.tell("d0", "break posts")
    is_exact(partial(gemma3.ask, expected, "broken"), expected)
    assert len(cluster.record("broken")["generations"]) > 1
    wait_until(lambda: process.popen.poll() is not None, "the worker to end")
    # Its tick notices, or the next READ that the core wants posted.
    assert re.search("cannot go on: (transport: |RemoteFault: the KV transport)", process.logged())
    wait_until(lambda: "d0" not in cluster.known(), "the router to drop it")
    assert cluster.http.get("/ready").status_code == 200  # the other one serves alone
    assert_exact(gemma3.ask(expected, "alone"), expected)
    assert cluster.record("alone")["generations"][0]["decode"]["worker_id"] == "p0"

    cluster.spawn("d0", "decode")
    cluster.wait_ready("d0")
    assert cluster.epochs["d0"] != old
    assert gemma3.serve(expected)["decode"]["epoch"] == cluster.epochs["d0"]


def test_with_nobody_left_the_router_is_not_ready(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    cluster.workers["p0"].kill()
    wait_until(lambda: "p0" not in cluster.known(), "the router to drop p0")
    assert cluster.http.get("/ready").status_code == 200
    cluster.workers["d0"].kill()
    wait_until(lambda: cluster.http.get("/ready").status_code == 503, "not ready")
    assert not is_exact(partial(gemma3.ask, expected, "nobody"), expected)


def test_a_dead_owner_does_not_end_its_reader(gemma3: ServedModel) -> None:
    """Control: a READ that fails for the owner's sake leaves the reader as it is."""
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    before = dict(cluster.epochs)
    told = cluster.tell("d0", "hold reads")
    answer = gemma3.ask_later(expected, "held")
    cluster.wait_told("d0", "held reads", told)
    cluster.workers["p0"].kill()
    told = cluster.tell("d0", "hold dones")
    cluster.tell("d0", "pass reads")
    cluster.wait_told("d0", "held dones", told)  # the READ has failed
    cluster.tell("d0", "pass dones")
    assert_exact(answer.result(60), expected)
    cluster.spawn("p0", "prefill")
    cluster.wait_ready("p0")
    generation = gemma3.serve(gemma3.prompt(150, salt="after"))
    assert generation["decode"]["epoch"] == before["d0"]
    assert generation["prefill"]["epoch"] != before["p0"]
