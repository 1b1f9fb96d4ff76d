"""A worker that was asked to drain keeps the KV of what decodes, for whoever takes it over."""

from typing import Any

from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.peer import Commit, CommitAnswer, Offers, TakeOver
from disagg.messages.sampling import SampledToken
from disagg.messages.session import CallOffDrain, Cancel, Drain, EndReason, PartEnded
from disagg.messages.submit import Role
from disagg.scheduling.actions import Drained, ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.draining import NOTICE_MS
from disagg.scheduling.stats import check_core
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import Send
from tests.unit.scheduling.test_inbound_admission import ME, steps, submit, worker

HEIR = Incarnation("heir", "1")
TIMEOUT_MS = 4_000
GIVES_UP_MS = 3_000
NEXT = RequestKey("r1", 2)


def decoding(**limits: Any) -> WorkerCore:
    """One request of 5 tokens, which has two more."""
    core = worker(**({"take_over_ms": 500} | limits))
    core.on_router_message(0, submit(1, Role.LOCAL))
    steps(core, 2)
    return core


def ends(actions: list[WorkerAction]) -> list[PartEnded]:
    messages = [action.message for action in actions if isinstance(action, ToRouter)]
    return [message for message in messages if isinstance(message, PartEnded)]


def sent(actions: list[WorkerAction], kind: type[Any]) -> list[Any]:
    messages = [action.message for action in actions if isinstance(action, Send)]
    assert all(action.to != ME for action in actions if isinstance(action, Send))
    return [message for message in messages if isinstance(message, kind)]


def test_what_decodes_is_kept_up_to_the_last_token_until_it_is_taken_over() -> None:
    core = decoding()
    core.on_router_message(0, Drain(TIMEOUT_MS, ends=True))
    assert ends(core.tick(GIVES_UP_MS - 1)) == []
    (ended,) = ends(core.tick(GIVES_UP_MS))
    assert (ended.reason, ended.num_kept_tokens) == (EndReason.DRAINING, 6)
    assert core.next_step(GIVES_UP_MS)[0] is None
    assert not any(isinstance(one, Drained) for one in core.tick(GIVES_UP_MS + 1))
    taken = core.on_peer_message(GIVES_UP_MS + 2, HEIR, TakeOver(NEXT, 1, ended.key, (0,)))
    (offers,) = sent(taken, Offers)
    assert offers.seal is not None
    assert (offers.seal.num_tokens, offers.seal.first_token_id) == (6, 7)
    assert sum(r.num_blocks for r in offers.ranges) == 2, "the block that is not full as well"
    attempt = Attempt(HEIR.epoch, 1)
    commit = Commit(NEXT, offers.lease_id, attempt, offers.seal.num_ranges)
    (answer,) = sent(core.on_peer_message(GIVES_UP_MS + 3, HEIR, commit), CommitAnswer)
    assert answer.ok
    assert any(isinstance(one, Drained) for one in core.tick(GIVES_UP_MS + 4))
    check_core(core)


def test_nobody_takes_it_over_and_its_blocks_are_free_again() -> None:
    core = decoding()
    core.drain(0, TIMEOUT_MS)
    core.tick(GIVES_UP_MS)
    assert core.kv.num_free_blocks < core.kv.num_usable_blocks
    assert any(isinstance(one, Drained) for one in core.tick(GIVES_UP_MS + 500))
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_a_step_in_flight_ends_first_and_its_token_counts() -> None:
    core = decoding()
    step, _ = core.next_step(0)
    assert step is not None
    core.drain(0, TIMEOUT_MS)
    assert ends(core.tick(GIVES_UP_MS)) == []
    core.on_step_done(GIVES_UP_MS, StepResult(step.step_id, (SampledToken(7),)))
    (ended,) = ends(core.tick(GIVES_UP_MS + 1))
    assert ended.num_kept_tokens == 7


def test_without_take_overs_nothing_is_kept() -> None:
    """Control: it is that setting which keeps it."""
    core = decoding(take_over_ms=0)
    core.drain(0, TIMEOUT_MS)
    (ended,) = ends(core.tick(GIVES_UP_MS))
    assert ended.num_kept_tokens == 0
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_the_router_plans_otherwise_and_what_was_kept_is_given_up() -> None:
    core = decoding()
    core.drain(0, TIMEOUT_MS)
    (ended,) = ends(core.tick(GIVES_UP_MS))
    core.on_router_message(GIVES_UP_MS, Cancel(ended.key, "draining"))
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_a_prompt_that_is_being_computed_ends() -> None:
    core = worker(take_over_ms=500)
    core.on_router_message(0, submit(1, Role.LOCAL, 40))
    steps(core, 1)
    core.drain(0, TIMEOUT_MS)
    (ended,) = ends(core.tick(GIVES_UP_MS))
    assert (ended.reason, ended.num_kept_tokens) == (EndReason.DRAINING, 0)


def test_who_is_to_stay_stays_and_takes_work_again() -> None:
    core = worker(take_over_ms=500)
    core.on_router_message(0, Drain(TIMEOUT_MS, ends=False))
    late = 10 * TIMEOUT_MS
    for now_ms in (NOTICE_MS, TIMEOUT_MS, late):
        assert not any(isinstance(one, Drained) for one in core.tick(now_ms))
    assert core.draining
    assert not core.ready
    core.on_router_message(late, CallOffDrain())
    assert core.ready
    core.on_router_message(late, submit(1, Role.LOCAL))
    steps(core, 1)


def test_who_is_to_end_ends_whatever_is_said_later_and_at_the_earlier_time() -> None:
    core = decoding()
    core.drain(0, TIMEOUT_MS)
    core.on_router_message(0, CallOffDrain())
    assert core.draining
    core.on_router_message(0, Drain(400, ends=False))
    (ended,) = ends(core.tick(300))
    assert ended.reason is EndReason.DRAINING
    core.on_router_message(301, Drain(TIMEOUT_MS, ends=False))
    core.tick(400)
    assert any(isinstance(one, Drained) for one in core.tick(401))
