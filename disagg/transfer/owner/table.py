"""The owner's side of the lease protocol: promises to hold blocks for a reader.

Sans-IO: time comes in, commands go out. The table is driven by one thread. What is not in the
table (never opened, dead, or forgotten after its commit) is refused, always safe.
"""

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import (
    AskOffers,
    Commit,
    CommitAnswer,
    CommitSeen,
    Ended,
    Offers,
    ReadProgress,
    Seal,
)
from disagg.transfer.actions import LeaseCommitted, LeaseListener, Send
from disagg.transfer.owner.lease import GroupBlocks, Lease
from disagg.transfer.owner.live import LiveLeases
from disagg.transfer.owner.states import LEASE_TABLE, LeaseEvent, LeaseState


class LeaseTable(LiveLeases):
    """What the owner and its readers do with leases: open, offer, seal, commit, end."""

    # -- the owner's own moves ----------------------------------------------------------------

    def open(
        self,
        now_ms: int,
        key: RequestKey,
        reader: Incarnation,
        listener: LeaseListener,
        first_lacked: tuple[int, ...] = (),
    ) -> int:
        """Create a lease, OPEN and empty; returns its id (from 1, never reused in an epoch).

        ``listener`` gets the news of its commit or end.

        Raises:
            InvariantViolation: the generation has a live lease already.
        """
        if key in self._by_key:
            raise InvariantViolation(f"{key} has a live lease already")
        lease = self.create(now_ms, key, reader, LeaseEvent.RESERVED, (), listener)
        lease.first_lacked = first_lacked
        self.is_hand_over(lease)
        return lease.lease_id

    def offer(self, now_ms: int, lease_id: int, blocks: GroupBlocks) -> None:
        """Hold finished blocks for the reader and offer them; nothing if the lease is dead.

        Args:
            now_ms: the time; prolongs the lease.
            lease_id: from `open`.
            blocks: per group, blocks that nobody will write again; never null blocks.

        Raises:
            InvariantViolation: the lease is sealed, or a (group, block index) is offered twice;
                nothing has changed then.
        """
        lease = self._live.get(lease_id)
        if lease is None:
            return
        first = len(lease.ranges)
        state = LEASE_TABLE.move(lease.state, LeaseEvent.OFFER)
        if self._take(lease, blocks):
            self._refresh(now_ms, lease, state)
            self.tell(lease, first)

    def renew(self, now_ms: int, lease_id: int, num_computed: int) -> None:
        """The prefill goes on, and nothing is to be offered yet: prolong, and show the reader.

        Nothing if the lease is dead; a figure that has not grown prolongs nothing.
        """
        lease = self._live.get(lease_id)
        if lease is not None and num_computed > lease.num_computed:
            lease.num_computed = num_computed
            self._refresh(now_ms, lease, LEASE_TABLE.move(lease.state, LeaseEvent.COMPUTED))
            self.out.add(Send(lease.reader, lease.offers(lease.num_offered)))

    def seal(
        self,
        now_ms: int,
        lease_id: int,
        blocks: GroupBlocks,
        num_tokens: int,
        first_token_id: int | None = None,
        first_logprob: float = 0.0,
        first_top_logprobs: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Offer the last blocks and close the list; nothing if the lease is dead.

        Args:
            now_ms: the time; prolongs the lease.
            lease_id: from `open`.
            blocks: one entry per group, empty where nothing is left to offer.
            num_tokens: tokens whose KV the lease covers.
            first_token_id: token 0 of a hand-over, with its log-probabilities.
            first_logprob: of token 0.
            first_top_logprobs: of token 0.

        Raises:
            InvariantViolation: as `offer`.
        """
        lease = self._live.get(lease_id)
        if lease is None:
            return
        first = len(lease.ranges)
        state = LEASE_TABLE.move(lease.state, LeaseEvent.SEAL)
        self._take(lease, blocks)
        lease.close(len(blocks), num_tokens, first_token_id, first_logprob, first_top_logprobs)
        self._refresh(now_ms, lease, state)
        self.tell(lease, first)

    def keep(
        self,
        now_ms: int,
        key: RequestKey,
        listener: LeaseListener,
        first_lacked: tuple[int, ...],
        blocks: GroupBlocks,
        num_tokens: int,
        last_token_id: int,
    ) -> None:
        """Hold blocks of a sequence that goes on elsewhere, for who takes it over.

        Its lease has no reader: it is opened, sealed and orphaned in one step.

        Args:
            now_ms: the time; nobody has to take it over later than ``take_over_ms`` after it.
            key: the generation that ends here.
            listener: gets the lease's news.
            first_lacked: per group, index of the first block that a reader may lack.
            blocks: per group, all that a query at ``num_tokens`` reads from there on; nobody will
                write them again.
            num_tokens: tokens whose KV the lease covers.
            last_token_id: the token after them.

        Raises:
            InvariantViolation: the generation has a live lease already.
        """
        lease = self._live[self.open(now_ms, key, self.me, listener, first_lacked)]
        lease.state = LEASE_TABLE.move(lease.state, LeaseEvent.SEAL)
        self._take(lease, blocks)
        lease.close(len(blocks), num_tokens, last_token_id)
        self._orphan(now_ms, lease)

    def end(self, lease_id: int, reason: str) -> None:
        """End a live lease, for whatever reason; nothing if it is not live."""
        lease = self._live.get(lease_id)
        if lease is not None:
            self.die(lease, LeaseEvent.END, reason)

    def end_key(self, key: RequestKey, reason: str) -> None:
        """End the live lease of a generation, if it has one."""
        lease = self.hand_over_of(key)
        if lease is not None:
            self.die(lease, LeaseEvent.END, reason)

    # -- messages -----------------------------------------------------------------------------

    def on_ask(self, sender: Incarnation, ask: AskOffers) -> None:
        """Send the offers from a number on, with the seal if there is one, or the lease's end.

        A reader that does not know the lease's id yet gets no answer when there is no lease, as
        it may be about to be opened.
        """
        lease_id = ask.lease_id
        lease = self.hand_over_of(ask.key) if lease_id is None else self.find(lease_id)
        if lease is None or lease.key != ask.key or lease.reader != sender:
            if lease_id is not None:
                self.out.add(Send(sender, Offers(ask.key, lease_id, 0, dead=True)))
            return
        state = LEASE_TABLE.move(lease.state, LeaseEvent.ASK)
        if state is LeaseState.ORPHANED:
            self.out.add(Send(sender, lease.dead()))
        elif state is not LeaseState.COMMITTED and (lease.request is None or lease.is_ready):
            first = max(0, min(ask.first, lease.num_offered))
            self.out.add(Send(sender, lease.offers(first)))

    def on_read_progress(self, now_ms: int, sender: Incarnation, progress: ReadProgress) -> None:
        """The reader has more blocks than before: prolong the lease."""
        lease = self._live.get(progress.lease_id)
        if (
            lease is not None
            and (lease.reader, lease.key) == (sender, progress.key)
            and progress.num_blocks_read > lease.num_read
            and LEASE_TABLE.allows(lease.state, LeaseEvent.READ_ON)
        ):
            lease.num_read = progress.num_blocks_read
            self._refresh(now_ms, lease, LEASE_TABLE.move(lease.state, LeaseEvent.READ_ON))

    def on_commit(self, sender: Incarnation, commit: Commit) -> None:
        """Confirm if everything offered was held until now, else refuse; both idempotent.

        A confirmation drops the lease's hold. A refusal changes nothing: the reader gives up.
        """
        lease = self.find(commit.lease_id)
        if lease is None:
            self.out.add(self._unknown_lease(sender, commit))
            return
        event, reason = self._judge(lease, sender, commit)
        state = LEASE_TABLE.move(lease.state, event)
        ok = event is not LeaseEvent.COMMIT_OTHER
        answer = CommitAnswer(commit.key, commit.lease_id, commit.attempt, ok, reason)
        self.out.add(Send(sender, answer))
        if event is not LeaseEvent.COMMIT_EQUAL:
            return
        lease.state = state
        lease.attempt = commit.attempt
        lease.ranges, lease.offered, lease.num_ready = [], {}, None
        self._no_longer_live(lease)
        self._committed.add(lease)
        self.holds.drop(lease.holder)
        lease.listener.lease_committed(LeaseCommitted(lease.key, lease.lease_id, lease.pull))

    def on_seen(self, sender: Incarnation, seen: CommitSeen) -> None:
        """Forget a committed lease whose reader got the confirmation."""
        self._committed.on_seen(sender, seen)

    def on_ended(self, sender: Incarnation, ended: Ended) -> None:
        """The reader ended its part of a generation: end its live lease."""
        lease = self.hand_over_of(ended.key)
        if lease and lease.reader == sender and lease.state is not LeaseState.ORPHANED:
            self.die(lease, LeaseEvent.END, ended.reason)

    def on_peer_lost(self, now_ms: int, reader: Incarnation) -> None:
        """A reader's stream ended for good or its epoch is over: end and forget its leases.

        Sealed hand-overs wait for another reader for ``take_over_ms``.
        """
        self._committed.on_peer_lost(reader)
        for lease in [one for one in self._live.values() if one.reader == reader]:
            waits = lease.seal is not None and not lease.is_pull and self._take_over_ms > 0
            if not waits:
                self.die(lease, LeaseEvent.READER_LOST, "peer_lost")
            elif lease.state is not LeaseState.ORPHANED:
                self._orphan(now_ms, lease)

    # -- inside -------------------------------------------------------------------------------

    def _judge(self, lease: Lease, sender: Incarnation, commit: Commit) -> tuple[LeaseEvent, str]:
        """Event of the table that a Commit is, and the reason of a refusal."""
        if not self._is_readers(lease, sender, commit):
            return LeaseEvent.COMMIT_OTHER, "the lease belongs to another reader"
        if lease.state is LeaseState.COMMITTED:
            if commit.attempt == lease.attempt:
                return LeaseEvent.COMMIT_SAME, ""
            return LeaseEvent.COMMIT_OTHER, "committed by another attempt"
        if lease.seal is None:
            return LeaseEvent.COMMIT_OTHER, "not sealed"
        if lease.state is LeaseState.ORPHANED:
            return LeaseEvent.COMMIT_OTHER, "its reader was lost"
        if not self._counts_equal(lease.seal, commit):
            return LeaseEvent.COMMIT_OTHER, "counts differ"
        return LeaseEvent.COMMIT_EQUAL, ""

    def _is_readers(self, lease: Lease, sender: Incarnation, commit: Commit) -> bool:
        return (
            sender == lease.reader
            and commit.attempt.reader_epoch == sender.epoch
            and commit.key == lease.key
        )

    def _counts_equal(self, seal: Seal, commit: Commit) -> bool:
        return commit.num_ranges == seal.num_ranges

    def _unknown_lease(self, sender: Incarnation, commit: Commit) -> Send:
        return Send(
            sender,
            CommitAnswer(commit.key, commit.lease_id, commit.attempt, False, "unknown lease"),
        )
