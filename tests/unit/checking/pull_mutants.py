"""Whole workers with one rule of prefix pulls or take-overs taken away each."""

from disagg.kv.prefix_pull import SharedPrefix, WantedPrefix
from disagg.messages.identity import Incarnation, Question, RequestKey
from disagg.messages.peer import (
    AskLease,
    Commit,
    Offers,
    PeerMessage,
    Reserved,
    TakeOver,
    WithdrawLease,
)
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.outgoing import Outgoing
from disagg.scheduling.parts import Parts
from disagg.scheduling.prefix_reader import PrefixReader
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.worker_core import WorkerCore
from disagg.transfer.actions import InboundAction, LeaseAction, LeaseCommitted, Send
from disagg.transfer.asked_leases import AskedLeases
from disagg.transfer.lease import Lease, ranges_of
from disagg.transfer.lease_asker import Answer, LeaseAsker
from disagg.transfer.lease_states import LeaseEvent, LeaseState
from disagg.transfer.leases import LeaseTable


class MatchesThenHolds(Outgoing):
    """Matches when the question comes, and holds what it found when it is repeated."""

    def on_open(
        self, now_ms: int, sender: Incarnation, message: AskLease, *, refuse: bool
    ) -> list[Send]:
        question = Question(sender, message.key, message.number)
        if self.asked.repeated(question) is not None:
            return []
        found: dict[Question, SharedPrefix | None] = self.__dict__.setdefault("_found", {})
        if question not in found:
            found[question] = self._prefixes.match(
                WantedPrefix(
                    message.num_tokens, message.first_hash, message.hashes, message.first_lacked
                )
            )
            return []
        shared = found[question]
        if shared is None:
            return []
        # As a pool would that does not look whether the block has another content by now.
        actions = self.asked.open_sealed(now_ms, question, ((),), shared.num_tokens)
        (lease,) = [one for one in self._leases._live.values() if one.question == question]
        lease.ranges = [r for g, pairs in enumerate(shared.blocks) for r in ranges_of(g, pairs)]
        lease.close(len(shared.blocks), shared.num_tokens)
        return [Send(sender, lease.offers(0))] if actions else []


class PublishedBeforeCommit(PrefixReader):
    """Finds the prefix in its cache as soon as the READs are posted."""

    def answered(
        self, now_ms: int, owner: Incarnation, offers: Offers
    ) -> list[InboundAction | ToRouter]:
        actions = super().answered(now_ms, owner, offers)
        pull = self.pulls.get(offers.key)
        if pull is not None:
            self._prefixes.publish_intact(
                pull.seq.request, pull.reservation.num_external_tokens, ()
            )
        return actions


class NeverWithdraws(LeaseAsker):
    """Gives questions up without a word."""

    def _withdraw(self, key: RequestKey, event, reason=""):  # type: ignore[no-untyped-def]
        send = super()._withdraw(key, event, reason)
        return Send(send.to, WithdrawLease(send.message.key, 99))  # type: ignore[union-attr]

    def withdrawal(self, sender: Incarnation, offers: Offers) -> list[Send]:
        return []


class BelievesAnyAnswer(LeaseAsker):
    """Takes the answer to a question from whichever life of the owner."""

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> Answer:
        asked = self._entries.get(offers.key)
        return super().on_offers(now_ms, asked.owner if asked else sender, offers)


class FailsTheGeneration(PrefixReader):
    """Keeps its blocks when a pull is given up."""

    def _drop(self, now_ms: int, key: RequestKey, reason: str) -> list[InboundAction]:
        return list(self._asker.give_up(key))


class TransfersInTwoSteps(AskedLeases):
    """The old lease dies at the first question; the new one is made at the second."""

    def transfer(self, now_ms: int, sender: Incarnation, transfer: TakeOver) -> list[LeaseAction]:
        ghosts: dict[RequestKey, Lease] = self.__dict__.setdefault("_ghosts", {})
        old = ghosts.get(transfer.old)
        if old is None:
            old = self._table.hand_over_of(transfer.old)
            if old is None or old.seal is None:
                return self.refuse(Question(sender, transfer.key, transfer.number))
            ghosts[transfer.old] = old
            return self._table.die(old, LeaseEvent.TRANSFER, "taken over")
        return _resurrect(self, now_ms, sender, transfer, old)


def _resurrect(
    asked: AskedLeases, now_ms: int, sender: Incarnation, transfer: TakeOver, old: Lease
) -> list[LeaseAction]:
    """A new lease on blocks that nobody has held meanwhile."""
    assert old.seal is not None
    question = Question(sender, transfer.key, transfer.number)
    lease = asked._create(now_ms, question, LeaseEvent.TRANSFER, ())
    lease.ranges, lease.seal, lease.first_lacked = old.ranges, old.seal, old.first_lacked
    asked._table.is_hand_over(lease)
    return [Send(sender, lease.offers(0))]


class CommittedAreTransferred(LeaseTable):
    """Remembers what a committed lease held, and lets it be taken over."""

    def on_commit(self, sender: Incarnation, commit: Commit) -> list[LeaseAction]:
        lease = self.find(commit.lease_id)
        ranges = list(lease.ranges) if lease else []
        actions = super().on_commit(sender, commit)
        if lease is not None and any(isinstance(one, LeaseCommitted) for one in actions):
            self.__dict__.setdefault("_ghosts", {})[lease.key] = (lease, ranges)
        return actions


class TransfersCommitted(AskedLeases):
    """Takes over whatever lease there was."""

    def transfer(self, now_ms: int, sender: Incarnation, transfer: TakeOver) -> list[LeaseAction]:
        ghost = getattr(self._table, "_ghosts", {}).get(transfer.old)
        if ghost is None:
            return super().transfer(now_ms, sender, transfer)
        old = Lease(0, transfer.old, sender, 0, LeaseState.SEALED)
        old.ranges, old.seal, old.first_lacked = ghost[1], ghost[0].seal, ghost[0].first_lacked
        return _resurrect(self, now_ms, sender, transfer, old)


class OrphansAreDropped(LeaseTable):
    """The lease of a lost reader gives its blocks back at once, but can be taken over."""

    def on_peer_lost(self, now_ms: int, reader: Incarnation) -> list[LeaseAction]:
        actions = super().on_peer_lost(now_ms, reader)
        for lease in self._live.values():
            if lease.state is LeaseState.ORPHANED:
                self.holds.drop(lease.holder)
                self.holds.hold(lease.holder, ())
        return actions

    def create(self, now_ms, key, reader, event, blocks, question=None):  # type: ignore[no-untyped-def]
        if event is not LeaseEvent.TRANSFER:
            return super().create(now_ms, key, reader, event, blocks, question)
        lease = super().create(now_ms, key, reader, event, (), question)
        for group, pairs in enumerate(blocks):
            lease.ranges += ranges_of(group, pairs)
        return lease


class ReservesWhilePulling(Parts):
    """Asks the decode worker for memory as soon as the READs of its own pull are posted."""

    def on_answer(self, now_ms: int, sender: Incarnation, offers: Offers) -> list[WorkerAction]:
        actions = super().on_answer(now_ms, sender, offers)
        pull = self._prefixes.pulls.get(offers.key)
        if pull and offers.key not in self._outgoing.reserving and pull.seq.lease_id is None:
            actions += self._outgoing.reserve(now_ms, pull.seq)
            pull.seq.phase = Phase.PULLING_PREFIX
        return actions

    def start(self, now_ms: int, seq: Sequence) -> list[WorkerAction]:
        if seq.lease_id is not None:
            self._batcher.run(seq)
            return []
        return [] if seq.key in self._outgoing.reserving else super().start(now_ms, seq)


class LendsWhatItPulls(WorkerCore):
    """Offers the blocks it is still reading itself."""

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        match message:
            case Reserved(key, granted=False) if key in self.prefixes.pulls:
                # No reason to give the pull up: it asks again when it has the blocks.
                self.outgoing._asker.on_answer(now_ms, sender, message)
                self.outgoing.reserving.pop(key, None)
                self.share.give_back(key)
                return []
        actions = super().on_peer_message(now_ms, sender, message)
        for pull in self.prefixes.pulls.values():
            seq = pull.seq
            if seq in self.batcher.running:
                self.batcher.remove(seq)
                seq.phase, seq.num_computed = Phase.PULLING_PREFIX, pull.plan.num_tokens
                actions += self.outgoing.offer(now_ms, seq)
                seq.num_computed = 0
        return actions
