"""Whose turn it is to take memory for a hand-over: the share, and the place in the queue."""

from collections.abc import Iterable

import pytest

from disagg.kv.blocks.hits import CacheHit
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Reserve, Reserved
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.handover.budget import HandoverBudget
from disagg.scheduling.step import Step, StepResult
from disagg.transfer.actions import Send
from tests.unit.scheduling.test_block_tables import new_core

PEER = Incarnation("d", "1")


def test_one_that_exceeds_the_share_alone_is_allowed_beside_the_others() -> None:
    budget = HandoverBudget(10)
    assert budget.take("short", 6)
    assert budget.take("long", 30)
    assert not budget.take("longer", 40)
    assert budget.take("other", 4)
    assert not budget.take("third", 1)
    assert not budget.exceeded
    budget.give_back("long")
    assert budget.take("longer", 40)
    assert budget.num_blocks == 50
    assert not budget.take("other", 11), "two would exceed it, each alone"
    assert budget.num_blocks == 50


def test_a_share_of_nothing_allows_nobody() -> None:
    budget = HandoverBudget(0)
    assert not budget.take("short", 1)
    assert not budget.exceeded


def submit(core: WorkerCore, name: str, role: Role = Role.PREFILL) -> list[WorkerAction]:
    peer = None if role is Role.LOCAL else PeerAddress(PEER, "host:1")
    key = RequestKey(name, 1)
    return core.on_router_message(0, Submit(key, role, (1, 2, 3), (), b"", SamplingParams(2), peer))


def reservations(actions: Iterable[WorkerAction]) -> list[str]:
    messages = [one.message for one in actions if isinstance(one, Send)]
    return [one.key.request_id for one in messages if isinstance(one, Reserve)]


def names(step: Step | None) -> list[str]:
    return [part.key.request_id for part in step.slices] if step else []


def test_who_was_refused_waits_before_those_that_came_later() -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)
    submit(core, "first")
    core.next_step(0)
    submit(core, "second")
    core.on_peer_message(0, PEER, Reserved(RequestKey("first", 1), 1, granted=False, reason=""))
    core.tick(1_000)
    assert [seq.key.request_id for seq in core.batcher.waiting] == ["first", "second"]


def test_a_reservation_is_made_while_a_step_runs_and_ends_in_time_for_the_next() -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100, steps_max=2)
    submit(core, "runs", Role.LOCAL)
    assert names(core.next_step(0)[0]) == ["runs"]
    assert reservations(submit(core, "handed over")) == ["handed over"]
    core.on_peer_message(0, PEER, Reserved(RequestKey("handed over", 1), 1, True, "", (0,)))
    step, actions = core.next_step(0)
    assert names(step) == ["runs", "handed over"]
    assert not reservations(actions)


def test_who_needs_nobody_keeps_its_place_until_the_next_step_is_planned() -> None:
    """What the running step publishes is found then; and nobody overtakes it for memory."""
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100, steps_max=2)
    submit(core, "runs", Role.LOCAL)
    core.next_step(0)
    submit(core, "local", Role.LOCAL)
    assert not reservations(submit(core, "handed over"))
    assert [seq.key.request_id for seq in core.batcher.waiting] == ["local", "handed over"]
    assert reservations(core.next_step(0)[1]) == ["handed over"]


def test_a_prefix_is_not_looked_up_early_for_who_needs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100, steps_max=2)
    submit(core, "runs", Role.LOCAL)
    core.next_step(0)
    find, looked_up = core.kv.find_longest_cache_hit, []

    def counted(request: KVSequence, max_tokens: int) -> CacheHit:
        looked_up.append(request)
        return find(request, max_tokens)

    monkeypatch.setattr(core.kv, "find_longest_cache_hit", counted)
    submit(core, "local", Role.LOCAL)
    assert not looked_up
    core.next_step(0)
    assert len(looked_up) == 1
    submit(core, "handed over")
    assert len(looked_up) == 2, "control"


def test_nobody_begins_while_the_steps_in_flight_are_let_end() -> None:
    """Who is in them lacks memory, and comes first."""
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100, steps_max=2)
    submit(core, "runs", Role.LOCAL)
    step, _ = core.next_step(0)
    assert step is not None
    core.batcher.let_steps_end()
    assert not reservations(submit(core, "handed over"))
    core.on_step_done(0, StepResult(step.step_id, (SampledToken(7),)))
    assert reservations(core.next_step(0)[1]) == ["handed over"]


def test_who_was_refused_tries_again_while_a_step_runs() -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100, steps_max=2)
    submit(core, "runs", Role.LOCAL)
    core.next_step(0)
    submit(core, "handed over")
    refused = Reserved(RequestKey("handed over", 1), 1, granted=False, reason="")
    core.on_peer_message(0, PEER, refused)
    assert reservations(core.tick(1_000)) == ["handed over"]
    assert not reservations(core.tick(1_000))
