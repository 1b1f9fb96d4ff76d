"""What other workers say reaches the side that it is for, and ends nothing that is not theirs."""

from typing import get_args

import pytest

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages import peer
from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import CheckTransport, ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.stats import check_core
from disagg.transfer.actions import READ_FAULTS, PostRead, Send
from tests.unit.scheduling.test_block_tables import new_core

PEER, STRANGER = Incarnation("x", "1"), Incarnation("y", "1")
KEY, UNKNOWN = RequestKey("r", 1), RequestKey("unknown", 1)

OF_UNKNOWN = (
    peer.Reserve(UNKNOWN, 1),
    peer.Reserved(UNKNOWN, 1, False, "full"),
    peer.Release(UNKNOWN, 1),
    peer.Offers(UNKNOWN, 1, 0, ()),
    peer.Offers(UNKNOWN, 1, 0, (), request_number=1),
    peer.ReadProgress(UNKNOWN, 1, 0),
    peer.AskOffers(UNKNOWN, 1, 0),
    peer.Commit(UNKNOWN, 1, Attempt("a", 1), (0,)),
    peer.CommitAnswer(UNKNOWN, 1, Attempt("a", 1), False, "gone"),
    peer.CommitSeen(UNKNOWN, 1, Attempt("a", 1)),
    peer.AskLease(UNKNOWN, 1, 4, 0, (b"value",), (0,)),
    peer.TakeOver(UNKNOWN, 1, KEY, (0,)),
    peer.LeaseRefused(UNKNOWN, 1),
    peer.LeaseLoading(UNKNOWN, 1, 0),
    peer.WithdrawLease(UNKNOWN, 1, "gone"),
    peer.Ended(UNKNOWN, "gone"),
    peer.WrongEpoch("0"),
)


def prefill() -> WorkerCore:
    """A worker that asks the peer for a reservation."""
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)
    address = PeerAddress(PEER, "host:1")
    sampling = SamplingParams(2)
    core.on_router_message(0, Submit(KEY, Role.PREFILL, (1, 2, 3), (), b"", sampling, address))
    core.next_step(0)
    return core


def ended(actions: list[WorkerAction]) -> list[EndReason]:
    """Reasons of the parts whose end the router hears of."""
    reports = [one.message for one in actions if isinstance(one, ToRouter)]
    return [one.reason for one in reports if isinstance(one, PartEnded)]


def test_every_message_is_tried() -> None:
    assert {type(one) for one in OF_UNKNOWN} == set(get_args(peer.PeerMessage))


@pytest.mark.parametrize("message", OF_UNKNOWN, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("sender", [PEER, STRANGER], ids=["peer", "stranger"])
def test_one_for_an_unknown_generation_changes_nothing(
    message: peer.PeerMessage, sender: Incarnation
) -> None:
    core = prefill()
    num_free, reserving = core.kv.pool.num_free, dict(core.prefill_side.reserving)
    assert not ended(core.on_peer_message(0, sender, message))
    assert (core.kv.pool.num_free, core.prefill_side.reserving) == (num_free, reserving)
    assert list(core.sequences) == [KEY]
    check_core(core)


@pytest.mark.parametrize("reason", sorted(READ_FAULTS))
@pytest.mark.parametrize("withdraws", [False, True])
def test_a_reader_whose_reads_failed_lets_the_transport_be_looked_at(
    reason: str, withdraws: bool
) -> None:
    core = prefill()
    message = peer.WithdrawLease(KEY, 1, reason) if withdraws else peer.Ended(UNKNOWN, reason)
    assert CheckTransport(f"{PEER} reported {reason}") in core.on_peer_message(0, PEER, message)
    other = peer.Ended(UNKNOWN, "cancelled")
    assert not any(isinstance(one, CheckTransport) for one in core.on_peer_message(0, PEER, other))


@pytest.mark.parametrize("loses", [False, True])
def test_a_hand_over_ends_by_its_peer_alone(loses: bool) -> None:
    core = prefill()

    def gone(sender: Incarnation) -> list[EndReason]:
        if loses:
            return ended(core.on_peer_lost(0, sender))
        return ended(core.on_peer_message(0, sender, peer.Ended(KEY, "gone")))

    assert gone(STRANGER) == []
    assert gone(PEER) == [EndReason.PEER_LOST if loses else EndReason.PEER_ENDED]
    assert not core.sequences
    check_core(core)


@pytest.mark.parametrize(
    ("num_tokens", "token"), [(3, None), (2, 7), (1 << 31, 7)], ids=["no token", "less", "more"]
)
def test_a_seal_of_something_else_ends_the_part_and_not_the_worker(
    num_tokens: int, token: int | None
) -> None:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)
    num_free = core.kv.pool.num_free
    address = PeerAddress(PEER, "host:1")
    submit = Submit(KEY, Role.DECODE, (1, 2, 3), (), b"", SamplingParams(2), address)
    core.on_router_message(0, submit)
    core.on_peer_message(0, PEER, peer.Reserve(KEY, 1))
    seal = peer.Seal(num_tokens, (1,), token)
    offers = peer.Offers(KEY, 1, 0, (peer.OfferedRange(0, 0, 5, 1),), seal)
    (read,) = (one for one in core.on_peer_message(0, PEER, offers) if isinstance(one, PostRead))
    sent = [one.message for one in core.on_read_done(0, read.read_id, "") if isinstance(one, Send)]
    (commit,) = (one for one in sent if isinstance(one, peer.Commit))
    answer = peer.CommitAnswer(KEY, 1, commit.attempt, True, "")
    assert ended(core.on_peer_message(0, PEER, answer)) == [EndReason.READ_FAILED]
    assert (core.kv.pool.num_free, core.sequences) == (num_free, {})
    check_core(core)
