"""Whole workers with one rule of prefix pulls or take-overs taken away each."""

from disagg.kv.prefix_sharing import SharedPrefix, WantedPrefix
from disagg.messages.identity import Incarnation, LeaseRequest, RequestKey
from disagg.messages.peer import (
    AskLease,
    Commit,
    Offers,
    PeerMessage,
    Reserved,
    TakeOver,
    WithdrawLease,
)
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.prefix_lending import PrefixLender
from disagg.scheduling.handover.prefix_pull import PrefixPullSide
from disagg.scheduling.sequence import Phase, Sequence
from disagg.transfer.actions import LeaseListener, Send
from disagg.transfer.owner.lease import Lease, ranges_of
from disagg.transfer.owner.requests import LeaseAnswers
from disagg.transfer.owner.states import LeaseEvent, LeaseState
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.requests import LeaseRequests
from disagg.transfer.reader.states import LeaseRequestEvent


class MatchesThenHolds(PrefixLender):
    """Matches when the request comes, and holds what it found when it is repeated."""

    def on_ask_lease(self, now_ms: int, sender: Incarnation, message: AskLease) -> None:
        request = LeaseRequest(sender, message.key, message.number)
        if request in self._answers._lease_ids:
            return
        found: dict[LeaseRequest, SharedPrefix | None] = self.__dict__.setdefault("_found", {})
        if request not in found:
            found[request] = self._prefixes.match(
                WantedPrefix(
                    message.num_tokens, message.first_hash, message.hashes, message.first_lacked
                )
            )
            return
        shared = found[request]
        if shared is None:
            return
        # As a pool would that does not look whether the block has another content by now.
        lease = self._answers._create(now_ms, request, LeaseEvent.OPENED, ((),), self)
        lease.is_pull = True
        lease.ranges = [r for g, pairs in enumerate(shared.blocks) for r in ranges_of(g, pairs)]
        lease.close(len(shared.blocks), shared.num_tokens)
        self._answers._table.out.add(Send(sender, lease.offers(0)))


class PublishedBeforeCommit(PrefixPullSide):
    """Finds the prefix in its cache as soon as the READs are posted."""

    def lease_granted(self, now_ms: int, owner: Incarnation, offers: Offers) -> None:
        super().lease_granted(now_ms, owner, offers)
        pull = self.pulls.get(offers.key)
        if pull is not None:
            self._prefixes.publish_intact(
                pull.seq.request, pull.reservation.num_external_tokens, ()
            )


class NeverWithdraws(LeaseRequests):
    """Gives requests up without a word."""

    def _withdraw(self, key: RequestKey, event: LeaseRequestEvent, reason: str = "") -> None:
        entry = self._leave(key, event)
        self._out.add(Send(entry.owner, WithdrawLease(key, 99)))

    def _decline(self, sender: Incarnation, offers: Offers) -> None:
        pass


class BelievesAnyAnswer(LeaseRequests):
    """Takes the answer to a request from whichever life of the owner."""

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> None:
        asked = self._entries.get(offers.key)
        super().on_offers(now_ms, asked.owner if asked else sender, offers)


class FailsTheGeneration(PrefixPullSide):
    """Keeps its blocks when a pull is given up."""

    def _drop(self, key: RequestKey, reason: str) -> None:
        self._requests.give_up(key)


class TransfersInTwoSteps(LeaseAnswers):
    """The old lease dies at the first request; the new one is made at the second."""

    def take_over(
        self, now_ms: int, sender: Incarnation, message: TakeOver, listener: LeaseListener
    ) -> None:
        ghosts: dict[RequestKey, Lease] = self.__dict__.setdefault("_ghosts", {})
        old = ghosts.get(message.old)
        if old is None:
            old = self._table.hand_over_of(message.old)
            if old is None or old.seal is None:
                self.refuse(LeaseRequest(sender, message.key, message.number))
                return
            ghosts[message.old] = old
            self._table.die(old, LeaseEvent.TRANSFER, "taken over")
        else:
            _resurrect(self, now_ms, sender, message, old, listener)


def _resurrect(
    answers: LeaseAnswers,
    now_ms: int,
    sender: Incarnation,
    message: TakeOver,
    old: Lease,
    listener: LeaseListener,
) -> None:
    """A new lease on blocks that nobody has held meanwhile."""
    assert old.seal is not None
    request = LeaseRequest(sender, message.key, message.number)
    lease = answers._create(now_ms, request, LeaseEvent.TRANSFER, (), listener)
    lease.ranges, lease.seal, lease.first_lacked = old.ranges, old.seal, old.first_lacked
    answers._table.is_hand_over(lease)
    answers._table.out.add(Send(sender, lease.offers(0)))


class CommittedAreTransferred(LeaseTable):
    """Remembers what a committed lease held, and lets it be taken over."""

    def on_commit(self, sender: Incarnation, commit: Commit) -> None:
        lease = self._live.get(commit.lease_id)
        ranges = list(lease.ranges) if lease else []
        super().on_commit(sender, commit)
        if lease is not None and lease.state is LeaseState.COMMITTED:
            self.__dict__.setdefault("_ghosts", {})[lease.key] = (lease, ranges)


class TransfersCommitted(LeaseAnswers):
    """Takes over whatever lease there was."""

    def take_over(
        self, now_ms: int, sender: Incarnation, message: TakeOver, listener: LeaseListener
    ) -> None:
        ghost = getattr(self._table, "_ghosts", {}).get(message.old)
        if ghost is None:
            super().take_over(now_ms, sender, message, listener)
            return
        old = Lease(0, message.old, sender, 0, listener, LeaseState.SEALED)
        old.ranges, old.seal, old.first_lacked = ghost[1], ghost[0].seal, ghost[0].first_lacked
        _resurrect(self, now_ms, sender, message, old, listener)


class OrphansAreDropped(LeaseTable):
    """The lease of a lost reader gives its blocks back at once, but can be taken over."""

    def on_peer_lost(self, now_ms: int, reader: Incarnation) -> None:
        super().on_peer_lost(now_ms, reader)
        for lease in self._live.values():
            if lease.state is LeaseState.ORPHANED:
                self.holds.drop(lease.holder)
                self.holds.hold(lease.holder, ())

    def create(self, now_ms, key, reader, event, blocks, listener, request=None):  # type: ignore[no-untyped-def]
        if event is not LeaseEvent.TRANSFER:
            return super().create(now_ms, key, reader, event, blocks, listener, request)
        lease = super().create(now_ms, key, reader, event, (), listener, request)
        for group, pairs in enumerate(blocks):
            lease.ranges += ranges_of(group, pairs)
        return lease


class ReservesWhilePulling(PrefillSide):
    """Has asked the decode worker for memory, or has a lease, when its own pull is over."""

    def start(self, now_ms: int, seq: Sequence) -> None:
        if seq.lease_id is not None:
            self._batcher.run(seq)
        elif seq.key not in self.reserving:
            super().start(now_ms, seq)


class LendsWhatItPulls(WorkerCore):
    """Asks for memory when its READs are posted, and offers the blocks it is still reading."""

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        match message:
            case Reserved(key, granted=False) if key in self.prefix_pull.pulls:
                # No reason to give the pull up: it asks again when it has the blocks.
                self.prefill_side._requests.on_answer(now_ms, sender, message)
                self.prefill_side.reserving.pop(key, None)
                self.budget.give_back(key)
                return []
        actions = super().on_peer_message(now_ms, sender, message)
        pulling = self.prefix_pull.pulls.get(message.key) if isinstance(message, Offers) else None
        if pulling and pulling.seq.lease_id is None:
            self.prefill_side.start(now_ms, pulling.seq)
            pulling.seq.phase = Phase.PULLING_PREFIX
        for pull in self.prefix_pull.pulls.values():
            seq = pull.seq
            if seq in self.batcher.running:
                self.batcher.remove(seq)
                seq.phase, seq.num_computed = Phase.PULLING_PREFIX, pull.plan.num_tokens
                self.prefill_side.offer(now_ms, seq, renew=False)
                seq.num_computed = 0
        return [*actions, *self._out.take()]


class ForgetsLiveAnswers(LeaseAnswers):
    """The oldest answers are forgotten, whether their leases are live or not."""

    def _is_live(self, request: LeaseRequest) -> bool:
        return False
