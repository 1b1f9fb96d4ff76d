"""The reader's side of the lease protocol: pulls that are believed only after their commit.

Sans-IO: time comes in, commands go out. The table is driven by one thread. Messages from another
incarnation than the owner's, or about a generation without a live transfer, change nothing.
"""

from collections.abc import Iterable, Sequence

from disagg.errors import InvariantViolation
from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.peer import CommitAnswer, CommitSeen, Offers
from disagg.transfer.actions import InboundDrained, InboundFailure, InboundListener, Send
from disagg.transfer.reader.live import LiveTransfers
from disagg.transfer.reader.offers import OfferList, ProtocolBreach
from disagg.transfer.reader.parts import Parts
from disagg.transfer.reader.reads import Read
from disagg.transfer.reader.states import INBOUND_TABLE, InboundEvent, InboundState
from disagg.transfer.reader.transfer import InboundTransfer


class InboundTable(LiveTransfers):
    """What the reader and its owners do with transfers: begin, offer, read, commit, finish."""

    # -- the reader's own moves ---------------------------------------------------------------

    def begin(
        self,
        now_ms: int,
        key: RequestKey,
        owner: Incarnation,
        destinations: Sequence[Sequence[tuple[int, int]]],
        listener: InboundListener,
        lease_id: int | None = None,
        surplus: Sequence[Iterable[int]] = (),
        parts: Parts | None = None,
    ) -> None:
        """Hold all destinations and wait for the owner's lease.

        Call it before the reservation's grant leaves: leases known by now count as older ones.

        Args:
            now_ms: the time.
            key: the generation.
            owner: the incarnation that will offer; nobody else is listened to.
            destinations: per group, (block index, block id) of every block the lease must offer.
            listener: gets the transfer's news.
            lease_id: of the lease, where it was granted to a request of this worker.
            surplus: per group, indexes of blocks that it may offer and that need not be read.
            parts: what is read of each block, of an owner whose blocks are not ours.

        Raises:
            InvariantViolation: the generation has a live transfer, or a destination is named
                twice; nothing has changed then.
        """
        if key in self._live:
            raise InvariantViolation(f"{key} has a live inbound transfer already")
        entry = InboundTransfer(
            self._last_serial + 1,
            key,
            owner,
            OfferList(destinations, surplus, parts, self._checksums is not None),
            listener,
            self._lease_seen.get(owner, 0),
            now_ms + self._ask_repeat_ms,
            lease_id=lease_id,
            progress_sent_ms=now_ms,
        )
        self.holds.hold(entry.holder, [block for pairs in destinations for _, block in pairs])
        self._last_serial = entry.serial
        self._entries[entry.serial] = entry
        self._live[key] = entry.serial

    def finish(self, key: RequestKey) -> None:
        """Drop the hold of a VALID or PARTIAL transfer; the caller has what it wants by now."""
        entry = self._entries[self._live[key]]
        INBOUND_TABLE.leave(entry.state, InboundEvent.FINISH)
        self._gone(entry)

    def abort(self, key: RequestKey) -> None:
        """Give a live transfer up; its destinations stay held until no READ is in progress.

        The listener gets no `InboundFailed`; nothing happens if there is no transfer.
        """
        entry = self._of(key)
        if entry and INBOUND_TABLE.allows(entry.state, InboundEvent.FINISH):
            self.finish(key)
            entry.listener.drained(InboundDrained(key, entry.num_blocks))
        elif entry:
            self._give_up(entry)
            self._drain(entry)

    # -- what happens -------------------------------------------------------------------------

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> None:
        """Post READs of what is new, request what is missing; fail if the lease is dead or bad."""
        self._lease_seen[sender] = max(self._lease_seen.get(sender, 0), offers.lease_id)
        entry = self._of(offers.key)
        if entry is None or entry.owner != sender or entry.is_over:
            return
        known = entry.lease_id
        oldest = entry.lease_floor + 1 if known is None else known
        if offers.lease_id < oldest:
            return
        if offers.dead or (known is not None and offers.lease_id > known):
            # One generation has one live lease: a newer one shows that ours is dead.
            self._fail(now_ms, entry, InboundFailure.LEASE_DEAD, "the owner ended its lease")
            return
        fresh = entry.state is InboundState.RESERVED
        event = InboundEvent.LEASE_KNOWN if fresh else InboundEvent.OFFERS
        if not INBOUND_TABLE.allows(entry.state, event):
            return
        entry.state = INBOUND_TABLE.move(entry.state, event)
        entry.lease_id = offers.lease_id
        if entry.offers.has_gap(offers):
            self._ask_gap(now_ms, entry)
            return
        sealed_before = entry.offers.seal is not None
        goes_on = offers.num_computed_tokens > entry.num_computed
        entry.num_computed = max(entry.num_computed, offers.num_computed_tokens)
        runs = entry.offers.take(offers)
        if isinstance(runs, ProtocolBreach):
            self._on_breach(now_ms, entry, runs)
            return
        if entry.offers.seal and not sealed_before:
            entry.sealed_ms = now_ms
            goes_on = True
        if goes_on or runs:
            entry.listener.progressed(now_ms, entry.key)
        self._post(now_ms, entry, runs)
        if entry.offers.seal and not entry.offers.all_listed:
            self._ask_gap(now_ms, entry)
        self._progress(now_ms, entry)

    def on_read_done(self, now_ms: int, read_id: int, error: str = "") -> None:
        """A READ is terminal; ``error`` is "" when it is DONE. Unknown ids are ignored."""
        ended = self._reads.end(now_ms, read_id)
        if ended is None:
            return
        read, owner_free = ended
        entry = self._entries.get(read.inbound)
        if entry is not None and INBOUND_TABLE.allows(entry.state, InboundEvent.READ_DONE):
            entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.READ_DONE)
            entry.read_ended(now_ms, read_id)
            entry.num_blocks_read += read.num_blocks
            if entry.state is InboundState.DRAINING:
                self._drain(entry)
            elif self._checksums is None or error:
                self._arrived(now_ms, entry, read.places if error else [], error)
            else:
                entry.summing.add(read_id)
                self._done[read_id] = read
                self._checksums.compute(self, read_id, read.dst)
        if owner_free:
            self._resume(now_ms, read.owner)

    def summed(self, now_ms: int, subject: int, checksums: Sequence[int]) -> None:
        """The checksums of a READ's blocks are known: those that differ have not arrived."""
        read = self._done.pop(subject)
        entry = self._entries.get(read.inbound)
        if entry is None or not INBOUND_TABLE.allows(entry.state, InboundEvent.SUMMED):
            return
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.SUMMED)
        entry.summing.discard(subject)
        failed = self._differing(read, checksums)
        self.num_mismatches += len(failed)
        self._arrived(now_ms, entry, failed, "their checksums differ" if failed else "")

    def on_commit_answer(self, now_ms: int, sender: Incarnation, answer: CommitAnswer) -> None:
        """Only a confirmation of the current attempt makes blocks valid; a refusal fails all."""
        entry = self._of(answer.key)
        if (
            entry is None
            or not self._is_current(entry, sender, answer)
            or not INBOUND_TABLE.allows(entry.state, InboundEvent.OK)
        ):
            return
        if not answer.ok or entry.offers.seal is None:
            self._fail(now_ms, entry, InboundFailure.COMMIT_REFUSED, answer.reason)
            return
        event = InboundEvent.OK_PARTLY if entry.failed else InboundEvent.OK
        entry.state = INBOUND_TABLE.move(entry.state, event)
        entry.report_commit(now_ms, entry.offers.seal)
        self.out.add(Send(sender, CommitSeen(answer.key, answer.lease_id, answer.attempt)))

    def on_peer_lost(self, now_ms: int, owner: Incarnation) -> None:
        """An owner's stream ended for good or its epoch is over; READs drain by themselves."""
        self._lease_seen.pop(owner, None)
        for entry in self._live_from(owner):
            if not entry.is_over:
                self._fail(now_ms, entry, InboundFailure.PEER_LOST, f"{owner} is gone")

    def tick(self, now_ms: int) -> None:
        """Repeat what is due; fail transfers with stuck READs and quarantine their blocks."""
        for read in self._reads.take_stuck(now_ms - self._read_stuck_ms):
            entry = self._entries[read.inbound]
            if entry.state is not InboundState.DRAINING:
                reason = InboundFailure.READ_STUCK
                self._fail(now_ms, entry, reason, read.age(now_ms), read.first)
        for entry in [self._entries[serial] for serial in self._live.values()]:
            if entry.repeat_ms <= now_ms:
                self._repeat(now_ms, entry)

    # -- inside -------------------------------------------------------------------------------

    def _arrived(
        self,
        now_ms: int,
        entry: InboundTransfer,
        failed: Sequence[tuple[int, int]],
        error: str,
    ) -> None:
        """A READ is over, and some of its blocks may not have arrived; the other READs go on.

        What arrives while the lease lives is of use.
        """
        entry.failed += failed
        entry.error = entry.error or error
        entry.listener.progressed(now_ms, entry.key)
        self._show_progress(now_ms, entry)
        self._progress(now_ms, entry)

    def _differing(self, read: Read, checksums: Sequence[int]) -> list[tuple[int, int]]:
        return read.differing(checksums)

    def _progress(self, now_ms: int, entry: InboundTransfer) -> None:
        """Commit once everything the seal promises was offered, fits, and is read."""
        if entry.state is not InboundState.READING or not self._all_listed(entry):
            return
        breach = self._incomplete(entry)
        if breach:
            self._on_breach(now_ms, entry, breach)
            return
        if entry.waiting or not self._reads_done(entry):
            return
        if entry.failed and len(set(entry.failed)) == entry.num_blocks:
            reason = InboundFailure.READ_FAILED
            self._fail(now_ms, entry, reason, entry.lost, entry.failed[0])
            return
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.COMPLETE)
        self._last_attempt += 1
        entry.attempt = Attempt(self.me.epoch, self._last_attempt)
        self._repeat(now_ms, entry)

    def _show_progress(self, now_ms: int, entry: InboundTransfer) -> None:
        """Let the owner prolong its lease, at most so often, while READs are left."""
        if now_ms - entry.progress_sent_ms >= self._progress_ms:
            entry.progress_sent_ms = now_ms
            self.out.add(Send(entry.owner, entry.read_progress))

    def _all_listed(self, entry: InboundTransfer) -> bool:
        return entry.offers.all_listed

    def _incomplete(self, entry: InboundTransfer) -> ProtocolBreach | None:
        seal = entry.offers.seal
        return entry.offers.incomplete(seal) if seal else None

    def _reads_done(self, entry: InboundTransfer) -> bool:
        return not entry.reads and not entry.summing

    def _is_current(
        self, entry: InboundTransfer, sender: Incarnation, answer: CommitAnswer
    ) -> bool:
        return (sender, answer.lease_id, answer.attempt) == (
            entry.owner,
            entry.lease_id,
            entry.attempt,
        )

    def _ask_gap(self, now_ms: int, entry: InboundTransfer) -> None:
        """Request the offers of a gap once; each later Offers over the same gap would repeat it."""
        if entry.gap_requested != len(entry.offers.ranges):
            entry.gap_requested = len(entry.offers.ranges)
            self._repeat(now_ms, entry)

    def _on_breach(self, now_ms: int, entry: InboundTransfer, breach: ProtocolBreach) -> None:
        message = f"{entry.owner} broke the protocol: {breach.problem}"
        self._fail(now_ms, entry, InboundFailure.READ_FAILED, message, breach.block)
