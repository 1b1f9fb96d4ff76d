"""Where the time of a prefill went: waiting, elsewhere, computing; the three are the whole."""

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Reserved
from disagg.messages.reports import PrefillReport, PrefillTimes
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.step import StepResult
from tests.unit.scheduling.test_block_tables import new_core

PEER = Incarnation("x", "1")
KEY = RequestKey("r", 1)
PROMPT = (1, 2, 3)


def submitted(role: Role) -> WorkerCore:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)
    peer = PeerAddress(PEER, "host:1") if role is Role.PREFILL else None
    core.on_router_message(100, Submit(KEY, role, PROMPT, (), b"", SamplingParams(2), peer))
    return core


def times(actions: list[WorkerAction]) -> PrefillTimes:
    (report,) = (
        one.message
        for one in actions
        if isinstance(one, ToRouter) and isinstance(one.message, PrefillReport)
    )
    assert report.times is not None
    return report.times


def compute(core: WorkerCore, start_ms: int, end_ms: int) -> PrefillTimes:
    step, _ = core.next_step(start_ms)
    assert step is not None
    result = StepResult(step.step_id, tuple(SampledToken(9) for _ in step.slices))
    return times(core.on_step_done(end_ms, result))


def test_a_local_prefill_waits_and_computes() -> None:
    assert compute(submitted(Role.LOCAL), 107, 150) == PrefillTimes(7, 0, 43)


def test_a_hand_over_waits_for_its_reservation_too() -> None:
    core = submitted(Role.PREFILL)
    core.next_step(110)
    core.on_peer_message(125, PEER, Reserved(KEY, 1, granted=True, first_lacked=(0,)))
    assert compute(core, 126, 150) == PrefillTimes(10 + 1, 15, 24)


def test_who_has_its_reservation_waits_for_the_step_that_runs() -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)
    core.on_router_message(
        90, Submit(RequestKey("other", 1), Role.LOCAL, PROMPT, (), b"", SamplingParams(2))
    )
    other, _ = core.next_step(90)
    assert other is not None
    core.on_router_message(
        100,
        Submit(KEY, Role.PREFILL, PROMPT, (), b"", SamplingParams(2), PeerAddress(PEER, "host:1")),
    )
    core.on_peer_message(104, PEER, Reserved(KEY, 1, granted=True, first_lacked=(0,)))
    core.on_step_done(120, StepResult(other.step_id, (SampledToken(9),)))
    assert compute(core, 120, 150) == PrefillTimes(16, 4, 30)


def test_what_a_refused_reservation_cost_is_waiting() -> None:
    core = submitted(Role.PREFILL)
    core.next_step(110)
    core.on_peer_message(125, PEER, Reserved(KEY, 1, granted=False, reason="full"))
    core.tick(1_000)
    core.next_step(1_000)
    core.on_peer_message(1_005, PEER, Reserved(KEY, 2, granted=True, first_lacked=(0,)))
    assert compute(core, 1_005, 1_015) == PrefillTimes(900, 5, 10)
