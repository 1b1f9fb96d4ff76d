"""The tables with one rule taken away each; the explorer must find what breaks."""

from dataclasses import replace

from disagg.kv.blocks.block_pool import BlockPool
from disagg.messages.identity import Attempt, Incarnation
from disagg.messages.peer import Commit, CommitAnswer, Offers, Seal
from disagg.transfer.actions import InboundPartial, InboundStats, Send
from disagg.transfer.owner.lease import GroupBlocks, Lease
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.offers import ProtocolBreach
from disagg.transfer.reader.states import INBOUND_TABLE, InboundEvent, InboundState
from disagg.transfer.reader.table import InboundTable
from disagg.transfer.reader.transfer import InboundTransfer


class CommitWithoutCountsOwner(LeaseTable):
    def _counts_equal(self, seal: Seal, commit: Commit) -> bool:
        return True


class CommitWithoutCountsReader(InboundTable):
    """Takes offers and seal as they come, whatever their numbers."""

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> None:
        entry = self._of(offers.key)
        first = min(offers.first, len(entry.offers.ranges)) if entry else 0
        super().on_offers(now_ms, sender, replace(offers, first=first))

    def _all_listed(self, entry: InboundTransfer) -> bool:
        return entry.offers.seal is not None

    def _incomplete(self, entry: InboundTransfer) -> ProtocolBreach | None:
        return None


class CommitBeforeDone(InboundTable):
    def _reads_done(self, entry: InboundTransfer) -> bool:
        return True


class OldAttemptAccepted(InboundTable):
    def _is_current(
        self, entry: InboundTransfer, sender: Incarnation, answer: CommitAnswer
    ) -> bool:
        return sender == entry.owner


class AnySenderAccepted(InboundTable):
    """Believes an answer whichever incarnation of the owner gave it."""

    def _is_current(
        self, entry: InboundTransfer, sender: Incarnation, answer: CommitAnswer
    ) -> bool:
        return (answer.lease_id, answer.attempt) == (entry.lease_id, entry.attempt)


class AttemptWithoutEpoch(InboundTable):
    def _repeat(self, now_ms: int, entry: InboundTransfer) -> None:
        if entry.attempt:
            entry.attempt = Attempt("", entry.attempt.number)
        super()._repeat(now_ms, entry)


class AnyReaderAccepted(LeaseTable):
    def _is_readers(self, lease: Lease, sender: Incarnation, commit: Commit) -> bool:
        return True


class ReusedBeforeDead(LeaseTable):
    """Expiry gives the blocks away while the lease can still be committed."""

    def expire(self, now_ms: int) -> None:
        for lease in self._live.values():
            self.holds.drop(lease.holder)
            self.holds.hold(lease.holder, ())


class OfferWithoutHold(LeaseTable):
    def _take(self, lease: Lease, blocks: GroupBlocks) -> bool:
        taken = super()._take(lease, blocks)
        self.holds.drop(lease.holder)
        self.holds.hold(lease.holder, ())
        return taken


class UnknownLeaseIsConfirmed(LeaseTable):
    def _unknown_lease(self, sender: Incarnation, commit: Commit) -> Send:
        answer = CommitAnswer(commit.key, commit.lease_id, commit.attempt, True)
        return Send(sender, answer)


class HoldKeptAfterCommit(LeaseTable):
    def on_commit(self, sender: Incarnation, commit: Commit) -> None:
        lease = self._live.get(commit.lease_id)
        assert isinstance(self.holds, BlockPool)
        if lease is not None:
            self.holds.hold("kept", self.holds.holders()[lease.holder])
        super().on_commit(sender, commit)
        if commit.lease_id in self._live:
            self.holds.drop("kept")


class DestinationsDroppedAtAbort(InboundTable):
    def _drained(self, entry: InboundTransfer) -> bool:
        self._gone(entry)
        return False


class ReadErrorsIgnored(InboundTable):
    def on_read_done(self, now_ms: int, read_id: int, error: str = "") -> None:
        super().on_read_done(now_ms, read_id)


class PartlyRightBeforeCommit(InboundTable):
    """What arrived of a transfer with READ errors is believed without asking the owner."""

    def _repeat(self, now_ms: int, entry: InboundTransfer) -> None:
        if entry.state is not InboundState.COMMITTING or not entry.failed:
            super()._repeat(now_ms, entry)
            return
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.OK_PARTLY)
        failed = tuple(entry.failed)
        partial = InboundPartial(entry.key, failed, "", InboundStats(0, (0,), 0, 0, 0, 0))
        entry.listener.partly_committed(now_ms, partial)


class HoldKeptAfterDraining(InboundTable):
    def _drained(self, entry: InboundTransfer) -> bool:
        assert isinstance(self.holds, BlockPool)
        if entry.reads:
            self.holds.drop("kept")
            self.holds.hold("kept", self.holds.holders()[entry.holder])
        return super()._drained(entry)
