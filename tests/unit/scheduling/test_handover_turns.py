"""Whose turn it is to take memory for a hand-over: the share, and the place in the queue."""

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Reserved
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import PeerAddress, Role, Submit
from disagg.scheduling.handover.budget import HandoverBudget
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


def test_who_was_refused_waits_before_those_that_came_later() -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)

    def submit(name: str) -> None:
        key = RequestKey(name, 1)
        address = PeerAddress(PEER, "host:1")
        core.on_router_message(
            0, Submit(key, Role.PREFILL, (1, 2, 3), (), b"", SamplingParams(2), address)
        )

    submit("first")
    core.next_step(0)
    submit("second")
    core.on_peer_message(0, PEER, Reserved(RequestKey("first", 1), 1, granted=False, reason=""))
    core.tick(1_000)
    assert [seq.key.request_id for seq in core.batcher.waiting] == ["first", "second"]
