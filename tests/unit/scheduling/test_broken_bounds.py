"""Each bound of the simulated worlds is broken once on purpose, and must be found."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.messages.identity import RequestKey
from disagg.routing.admission import Admission
from disagg.routing.ended_requests import EndedRequests
from disagg.routing.request import RoutedRequest
from disagg.routing.request_lifecycle import AHEAD_MAX, RequestLifecycle
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.handover.budget import HandoverBudget
from disagg.scheduling.handover.inbound_admission import InboundAdmission
from disagg.scheduling.parts import Parts
from disagg.scheduling.step import SequenceSlice, Step
from disagg.testing.simulation.bounds import check_router, check_step
from disagg.testing.simulation.config import SimulationConfig
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reservation.table import ReservationTable
from tests.unit.scheduling.long_worlds import (
    POOLS_FULL,
    QUEUES_FULL,
    TAKES_OVER,
    fair_load,
    hour_long,
    longest_wait_ms,
    play,
    slow_links,
    stands_still,
)

Patch = pytest.MonkeyPatch


def admit_everything(patch: Patch) -> None:
    """Neither reservations nor take-overs nor pulls look at the limits."""
    patch.setattr(InboundAdmission, "refusal", lambda self, owner: "")


def spend_any_budget(patch: Patch) -> None:
    """Hand-overs take as much of a pool as there is."""

    def take(self: HandoverBudget, key: Hashable, num_blocks: int) -> bool:
        self._taken[key] = num_blocks
        return True

    patch.setattr(HandoverBudget, "take", take)


def keep_the_budget(patch: Patch) -> None:
    """What a hand-over took is not counted back."""
    patch.setattr(HandoverBudget, "give_back", lambda self, key: None)


def queue_everybody(patch: Patch) -> None:
    """A worker's queue has no end."""
    patch.setattr(Parts, "queue", lambda self, seq: self._batcher.enqueue(seq))


def take_any_request(patch: Patch) -> None:
    """The router's door is open."""
    create = Admission.__init__

    def careless(self: Admission, *args: Any, **options: Any) -> None:
        create(self, *args, **options | {"requests_max": 1 << 30})

    patch.setattr(Admission, "__init__", careless)


def keep_all_records(patch: Patch) -> None:
    """Records of ended requests are never dropped."""

    def add(self: EndedRequests, request: RoutedRequest) -> None:
        self._requests[request.request_id] = request

    patch.setattr(EndedRequests, "add", add)


def wait_for_ever(patch: Patch) -> None:
    """The router gives nobody up."""
    patch.setattr(RequestLifecycle, "expire", lambda self, now_ms: [])


def hear_no_progress(patch: Patch) -> None:
    """A prefill that goes on does not renew the router's patience."""
    patch.setattr(RoutedRequest, "computed", lambda self, now_ms, num_computed_tokens: None)


def renew_no_lease(patch: Patch) -> None:
    """Chunks without blocks to offer do not prolong the lease."""
    patch.setattr(LeaseTable, "renew", lambda self, now_ms, lease_id, num_computed: None)


def renew_no_reservation(patch: Patch) -> None:
    """A reservation has one deadline, whatever is offered and read."""
    patch.setattr(ReservationTable, "renew", lambda self, now_ms, key: None)


ALONE = replace(hour_long("hybrid"), roles=("both",))
STUCK = replace(stands_still("hybrid"), roles=("both",))
CASES: dict[str, tuple[Callable[[Patch], None], SimulationConfig, str]] = {
    "sequences": (admit_everything, TAKES_OVER, "sequences, at most"),
    "budget": (spend_any_budget, POOLS_FULL, "blocks of hand-overs, at most"),
    "rest": (keep_the_budget, replace(POOLS_FULL, time_limit_ms=20_000), "no end"),
    "queue": (queue_everybody, QUEUES_FULL, "queued, at most"),
    "door": (take_any_request, QUEUES_FULL, "requests, at most"),
    "records": (keep_all_records, replace(QUEUES_FULL, records_max=10), "records, at most"),
    "patience": (wait_for_ever, STUCK, "stands still"),
    "progress": (hear_no_progress, ALONE, "got on"),
    "reads": (hear_no_progress, slow_links("full"), "got on"),
    "lease": (renew_no_lease, hour_long("windows"), "after it went on"),
    "reservation": (renew_no_reservation, hour_long("full"), "after it went on"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_bound_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, config, message = CASES[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        play(config)


def test_a_batch_that_is_too_large_is_found() -> None:
    part = SequenceSlice(RequestKey("r", 1), (1, 2), 0, True, ())
    assert check_step(Step(0, (part,) * 8), POOLS_FULL) == 16
    with pytest.raises(AssertionError, match="9 sequences"):
        check_step(Step(0, (part,) * 9), POOLS_FULL)
    with pytest.raises(AssertionError, match="16 tokens"):
        check_step(Step(0, (part,) * 8), replace(POOLS_FULL, max_step_tokens=15))


def test_too_many_tokens_that_wait_for_one_before_them_are_found() -> None:
    stream = SimpleNamespace(num_ahead=AHEAD_MAX)
    requests = {"r": SimpleNamespace(request_id="r", stream=stream)}
    router: Any = SimpleNamespace(num_live=1, _live=requests.values())
    check_router(router, POOLS_FULL)
    stream.num_ahead += 1
    with pytest.raises(AssertionError, match="ahead"):
        check_router(router, POOLS_FULL)


def test_prefills_that_overtake_break_the_bound_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    build_step = Batcher.build_step

    def youngest_first(self: Batcher) -> Any:
        for seq in self.running:
            seq.arrival = -abs(seq.arrival)
        return build_step(self)

    monkeypatch.setattr(Batcher, "build_step", youngest_first)
    assert longest_wait_ms(play(fair_load())) > 5_000
