"""A fleet that runs is asked what it takes, as `disagg calibrate --fleet --admin` does."""

import re
import threading

import pytest

from disagg.commands import fleet_requests
from disagg.commands.fleet_requests import RunningFleet, prompt_of
from disagg.commands.measured_fleet import AskShape, ask_fleet
from disagg.errors import RemoteFault
from tests.process.harness import MODEL, Cluster, wait_until
from tests.process.served_model import ServedModel

pytestmark = pytest.mark.timeout(600)

SHAPES = (AskShape(48), AskShape(48, 4), AskShape(64, 1, 1), AskShape(64, num_prefix=96))


def running(cluster: Cluster, *, admin: bool = True) -> RunningFleet:
    return RunningFleet(cluster.url, MODEL, cluster.admin_url if admin else "")


def test_workers_say_what_prompts_took_of_their_first_tokens(gemma3: ServedModel) -> None:
    said: list[str] = []
    told = ask_fleet(SHAPES, running(gemma3.cluster), 2, said.append)
    assert set(told) == set(SHAPES)
    assert len(said) == 2
    for shape, one in told.items():
        assert one.compute_ms is not None
        assert 0 < one.compute_ms <= one.ttft_ms
        assert one.tpot_ms > 0
        assert one.second_ms is not None
        assert one.second_ms > 0
        assert bool(one.num_cached) is bool(shape.num_prefix)
    untold = ask_fleet(SHAPES[:1], running(gemma3.cluster, admin=False), 1, said.append)
    assert untold[SHAPES[0]].compute_ms is None, "control: nobody was asked"


def test_a_fleet_says_of_which_workers_its_times_are(gemma3: ServedModel) -> None:
    fleet = running(gemma3.cluster)
    told = {one.measured for one in fleet.wait_until_idle()}
    assert len(told) == 1, "workers of one kind"
    (measured,) = told
    assert measured.max_model_tokens == fleet.model_tokens() > 0
    assert measured.block_tokens
    assert measured.max_sequences
    assert measured.dtype == "float32"


def test_a_fleet_that_serves_others_is_not_calibrated(
    gemma3: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = gemma3.cluster
    fleet = running(cluster)
    fleet.wait_until_idle()  # of what ran before workers tell with their next report
    monkeypatch.setattr(fleet_requests, "IDLE_S", 0.0)
    cluster.tell("p0", "hold steps")
    other = threading.Thread(target=fleet.ask_at_once, args=([prompt_of(48)],))
    other.start()
    try:

        def refused() -> bool:
            """For the worker that is held; the other one may have told of the request before."""
            try:
                fleet.wait_until_idle()
            except RemoteFault as fault:
                return bool(re.search("p0.* serve requests", fault.message))
            return False

        wait_until(refused, "the router to see the request")
    finally:
        cluster.tell("p0", "pass steps")
        other.join()
    cluster.wait_quiescent()
