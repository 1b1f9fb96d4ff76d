"""What comes from elsewhere is admitted in one place: `Reserve`, take-over, prefix pull."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import InvariantViolation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, Ended, Reserve, Reserved, TakeOver
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.handover.inbound_admission import InboundAdmission
from disagg.scheduling.stats import check_core, check_load
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import Send
from disagg.transfer.reader.table import InboundTable
from tests.unit.scheduling.test_preempted_prefill import LIMITS

ME, OWNER = Incarnation("me", "1"), Incarnation("owner", "1")
PEER = PeerAddress(OWNER, "host:1")


def worker(num_blocks: int = 16, **limits: Any) -> WorkerCore:
    layout = plan_layout([FullAttentionSpec(4, 1, 8, 4)])
    kv = KVCacheCoordinator(layout, num_blocks, max_model_tokens=64, max_step_tokens=16)
    bounds = replace(LIMITS, max_model_tokens=64, max_step_tokens=16, **limits)
    return WorkerCore(ME, layout, kv, BlockHasher(b"key", 4), bounds, lambda _: 1)


def submit(number: int, role: Role, num_tokens: int = 5, **more: Any) -> Submit:
    tokens = tuple(range(100 * number, 100 * number + num_tokens))
    peer = None if role is Role.LOCAL else PEER
    key = RequestKey(f"r{number}", 1)
    return Submit(key, role, tokens, (), b"", SamplingParams(8), peer, **more)


def steps(core: WorkerCore, num_steps: int) -> None:
    for _ in range(num_steps):
        step, _ = core.next_step(0)
        assert step is not None
        samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
        core.on_step_done(0, StepResult(step.step_id, samples))


def busy(core: WorkerCore) -> WorkerCore:
    """One request runs there."""
    core.on_router_message(0, submit(1, Role.LOCAL))
    steps(core, 1)
    return core


def waiting_for_memory() -> WorkerCore:
    """Of two requests that grow, the younger was preempted and waits for memory."""
    core = worker(num_blocks=5)
    core.on_router_message(0, submit(1, Role.LOCAL, 7))
    core.on_router_message(0, submit(2, Role.LOCAL, 7))
    while not core.batcher.preempted_waiting:
        steps(core, 1)
    return core


def reserve(core: WorkerCore, number: int = 5) -> Reserved:
    """The answer to a reservation of a generation that was submitted as a hand-over."""
    asked = submit(number, Role.DECODE, 4)
    core.on_router_message(0, asked)
    (answer,) = [
        action.message
        for action in core.on_peer_message(0, OWNER, Reserve(asked.key, 1))
        if isinstance(action, Send) and isinstance(action.message, Reserved)
    ]
    return answer


def take_over(core: WorkerCore, number: int = 6) -> list[WorkerAction]:
    old = RequestKey(f"r{number}", 0)
    return core.on_router_message(0, submit(number, Role.DECODE, 4, take_over=old))


def pull(core: WorkerCore, number: int = 7) -> list[WorkerAction]:
    core.on_router_message(0, submit(number, Role.LOCAL, 9, pull=PullPlan(PEER, 8)))
    return core.next_step(0)[1]


def requests(actions: Sequence[WorkerAction]) -> list[type]:
    kinds = (TakeOver, AskLease)
    return [
        type(one.message)
        for one in actions
        if isinstance(one, Send) and isinstance(one.message, kinds)
    ]


def ended(actions: Sequence[WorkerAction]) -> list[tuple[EndReason, str]]:
    said = [one.message for one in actions if isinstance(one, ToRouter)]
    return [(one.reason, one.message) for one in said if isinstance(one, PartEnded)]


def test_with_room_each_is_admitted() -> None:
    assert reserve(busy(worker())).granted
    assert requests(take_over(busy(worker()))) == [TakeOver]
    core = worker()
    assert requests(pull(core)) == [AskLease]


def test_no_more_sequences_than_the_limit() -> None:
    core = busy(worker(max_sequences=1))
    answer = reserve(core)
    assert (answer.granted, answer.reason) == (False, "too many sequences")
    for number in (6, 7, 8):
        actions = take_over(core, number)
        assert requests(actions) == []
        assert ended(actions) == [(EndReason.TAKE_OVER_REFUSED, "too many sequences")]
    check_core(core)
    assert core.generations.num_holding == 1


def test_a_prefill_that_reserves_elsewhere_counts() -> None:
    core = worker(max_sequences=1)
    core.on_router_message(0, submit(1, Role.PREFILL))
    core.next_step(0)
    assert core.prefill_side.reserving
    assert reserve(core).reason == "too many sequences"


def test_the_oldest_that_waits_for_memory_goes_first() -> None:
    core = waiting_for_memory()
    reason = "an older request waits for memory"
    assert reserve(core).reason == reason
    assert ended(take_over(core)) == [(EndReason.TAKE_OVER_REFUSED, reason)]
    check_core(core)


class Paused(InboundTable):
    """A READ from the owner is stuck."""

    @property
    def peers_paused(self) -> frozenset[Incarnation]:
        return frozenset({OWNER})


def test_a_stuck_read_pauses_its_owner_for_all_of_them() -> None:
    core = worker()
    core.inbound.__class__ = Paused
    assert ended(take_over(core))[0][1] == "a READ from there is stuck"
    assert requests(pull(core)) == []


def test_a_hand_over_from_the_owner_of_a_stuck_read_ends_at_once() -> None:
    core = worker()
    core.inbound.__class__ = Paused
    asked = submit(5, Role.DECODE)
    key = asked.key
    core.on_router_message(0, asked)
    actions = core.on_peer_message(0, OWNER, Reserve(key, 1))
    # Not a refusal: the prefill worker would ask again and again, for seconds.
    assert ended(actions) == [(EndReason.READ_STUCK, "a READ from there is stuck")]
    assert [one.message for one in actions if isinstance(one, Send)] == [
        Ended(key, EndReason.READ_STUCK)
    ]
    assert (core.sequences, core.budget.num_blocks) == ({}, 0)
    check_core(core)


def test_a_take_over_stays_within_the_budget() -> None:
    core = worker(handover_share_max=0.05)
    assert ended(take_over(core))[0] == (EndReason.TAKE_OVER_REFUSED, "hand-over share used up")


@pytest.mark.parametrize("role", [Role.LOCAL, Role.PREFILL])
def test_the_queue_is_bounded(role: Role) -> None:
    core = worker(max_waiting=2)
    ends = [ended(core.on_router_message(0, submit(n, role))) for n in range(1, 5)]
    full = [(EndReason.CAPACITY, "the queue is full")]
    assert ends == [[], [], full, full]


def test_who_backs_off_is_still_in_the_queue() -> None:
    core = worker(max_waiting=2, handover_share_max=0.0)
    for number in (1, 2):
        core.on_router_message(0, submit(number, Role.PREFILL))
        core.next_step(0)
    assert len(core.prefill_side.backing_off) == 2
    assert ended(core.on_router_message(0, submit(3, Role.LOCAL)))[0][0] is EndReason.CAPACITY


def test_awaited_hand_overs_are_bounded() -> None:
    core = worker(max_waiting=1)
    core.on_router_message(0, submit(1, Role.DECODE))
    (end,) = ended(core.on_router_message(0, submit(2, Role.DECODE)))
    assert end == (EndReason.CAPACITY, "too many awaited hand-overs")


def test_a_limit_that_is_not_kept_is_found() -> None:
    class TakesAll(InboundAdmission):
        def refusal(self, owner: Incarnation) -> str:
            return ""

    core = busy(worker(max_sequences=1))
    core.admission.__class__ = TakesAll
    take_over(core)
    with pytest.raises(InvariantViolation, match="2 sequences, at most 1"):
        check_load(core)
