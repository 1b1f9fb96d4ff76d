"""The owner's side of the lease protocol: promises to hold blocks for a reader.

Sans-IO: time comes in, actions go out. The table is driven by one thread. What is not in the
table (never opened, dead, or forgotten after its commit) is answered NO or dead, always safe.
"""

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, Question, RequestKey
from disagg.messages.peer import AskOffers, Commit, CommitAnswer, CommitSeen, Ended, Offers, Seal
from disagg.transfer.actions import LeaseAction, LeaseCommitted, LeaseEnded, Send
from disagg.transfer.holds import BlockHolds
from disagg.transfer.lease import GroupBlocks, Lease, LeaseStatus, ranges_of
from disagg.transfer.lease_states import LEASE_TABLE, LeaseEvent, LeaseState


class LeaseTable:
    """Leases of this incarnation.

    The live ones are as many as the caller opens (one hand-over per key, one prefix pull per
    question); of the committed ones, whose hold is gone, at most ``committed_max`` are
    remembered.

    Args:
        me: this worker; lease ids count up within its epoch.
        holds: the block pool; a lease holds under ``("lease", key, lease_id)``.
        ttl_ms: a lease dies this long after its owner last opened, offered or sealed.
        committed_max: committed leases remembered until the reader acknowledges.
        take_over_ms: a sealed hand-over whose reader is lost lives on so long; 0: not at all.
    """

    def __init__(
        self,
        me: Incarnation,
        holds: BlockHolds,
        *,
        ttl_ms: int,
        committed_max: int,
        take_over_ms: int = 0,
    ) -> None:
        self.me = me
        self.holds = holds
        self._ttl_ms = ttl_ms
        self._committed_max = committed_max
        self._last_id = 0
        # Every refresh adds the same ttl, so insertion order is the order of expiry: an exactly
        # bounded stand-in for a heap. `_by_key` is in order of opening.
        self._live: dict[int, Lease] = {}
        self._by_key: dict[RequestKey, int] = {}
        self._committed: dict[int, Lease] = {}
        self._take_over_ms = take_over_ms
        self._orphans: dict[int, int] = {}
        """Deadlines of live leases without a reader, in order."""

    # -- the owner's own moves ----------------------------------------------------------------

    def open(
        self,
        now_ms: int,
        key: RequestKey,
        reader: Incarnation,
        first_lacked: tuple[int, ...] = (),
    ) -> int:
        """Create a lease, OPEN and empty; returns its id (from 1, never reused in an epoch).

        Raises:
            InvariantViolation: the generation has a live lease already.
        """
        if key in self._by_key:
            raise InvariantViolation(f"{key} has a live lease already")
        lease = self.create(now_ms, key, reader, LeaseEvent.RESERVED, ())
        lease.first_lacked = first_lacked
        self.is_hand_over(lease)
        return lease.lease_id

    def offer(self, now_ms: int, lease_id: int, blocks: GroupBlocks) -> list[LeaseAction]:
        """Hold finished blocks for the reader and offer them; nothing if the lease is dead.

        Args:
            now_ms: the time; prolongs the lease.
            lease_id: from `open`.
            blocks: per group, blocks that nobody will write again; never null blocks.

        Raises:
            InvariantViolation: the lease is sealed, or a (group, position) is offered twice;
                nothing has changed then.
        """
        lease = self._live.get(lease_id)
        if lease is None:
            return []
        first = len(lease.ranges)
        state = LEASE_TABLE.move(lease.state, LeaseEvent.OFFER)
        if not self._take(lease, blocks):
            return []
        self._refresh(now_ms, lease, state)
        return [Send(lease.reader, lease.offers(first))]

    def seal(
        self,
        now_ms: int,
        lease_id: int,
        blocks: GroupBlocks,
        num_tokens: int,
        first_token_id: int = -1,
        first_logprob: float = 0.0,
        first_top_logprobs: tuple[tuple[int, float], ...] = (),
    ) -> list[LeaseAction]:
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
            return []
        first = len(lease.ranges)
        state = LEASE_TABLE.move(lease.state, LeaseEvent.SEAL)
        self._take(lease, blocks)
        lease.close(len(blocks), num_tokens, first_token_id, first_logprob, first_top_logprobs)
        self._refresh(now_ms, lease, state)
        return [Send(lease.reader, lease.offers(first))]

    def end(self, lease_id: int, reason: str) -> list[LeaseAction]:
        """End a live lease, for whatever reason; nothing if it is not live."""
        lease = self._live.get(lease_id)
        return self.die(lease, LeaseEvent.END, reason) if lease else []

    def end_key(self, key: RequestKey, reason: str) -> list[LeaseAction]:
        """End the live lease of a generation, if it has one."""
        return self.end(self._by_key.get(key, 0), reason)

    def expire(self, now_ms: int) -> list[LeaseAction]:
        """End the leases whose time to live is over, or whose reader nobody replaced in time."""
        actions: list[LeaseAction] = []
        for lease_id in [one for one, until_ms in self._orphans.items() if until_ms <= now_ms]:
            actions += self.die(self._live[lease_id], LeaseEvent.EXPIRE, "nobody took it over")
        while self._live and (lease := next(iter(self._live.values()))).expires_ms <= now_ms:
            actions += self.die(lease, LeaseEvent.EXPIRE, "expired")
        return actions

    def next_expiry_ms(self) -> int | None:
        """When `expire` has something to do; None if there is no live lease."""
        first = next((lease.expires_ms for lease in self._live.values()), None)
        due = [*self._orphans.values(), *(() if first is None else (first,))]
        return min(due, default=None)

    # -- messages -----------------------------------------------------------------------------

    def on_ask(self, sender: Incarnation, ask: AskOffers) -> list[LeaseAction]:
        """Answer with the offers from a number on, the seal if there is one, or dead.

        Lease id 0 stands for the generation's live lease, whose id the reader does not know
        yet; it is not answered when there is none, as the lease may be about to be opened.
        """
        lease_id = ask.lease_id or self._by_key.get(ask.key, 0)
        lease = self._live.get(lease_id) or self._committed.get(lease_id)
        if lease is None or lease.key != ask.key or lease.reader != sender:
            dead = Send(sender, Offers(ask.key, ask.lease_id, 0, dead=True))
            return [dead] if ask.lease_id else []
        state = LEASE_TABLE.move(lease.state, LeaseEvent.ASK)
        if state is LeaseState.COMMITTED:
            return []
        if state is LeaseState.ORPHANED:
            return [Send(sender, lease.dead())]
        return [Send(sender, lease.offers(max(0, min(ask.first, len(lease.ranges)))))]

    def on_commit(self, sender: Incarnation, commit: Commit) -> list[LeaseAction]:
        """Answer OK if everything offered was held until now, else NO; both idempotent.

        An OK drops the lease's hold. A NO changes nothing: the reader gives up by itself.
        """
        lease = self._live.get(commit.lease_id) or self._committed.get(commit.lease_id)
        if lease is None:
            return [self._unknown_lease(sender, commit)]
        event, reason = self._judge(lease, sender, commit)
        state = LEASE_TABLE.move(lease.state, event)
        ok = event is not LeaseEvent.COMMIT_OTHER
        answer = Send(
            sender,
            CommitAnswer(commit.key, commit.lease_id, commit.attempt, ok, reason),
        )
        if event is not LeaseEvent.COMMIT_EQUAL:
            return [answer]
        lease.state = state
        lease.attempt = commit.attempt
        lease.ranges, lease.offered = [], {}
        self._no_longer_live(lease)
        self._committed[lease.lease_id] = lease
        while len(self._committed) > self._committed_max:
            self._forget(next(iter(self._committed.values())), LeaseEvent.CROWDED_OUT)
        self.holds.drop(lease.holder)
        return [answer, LeaseCommitted(lease.key, lease.lease_id, lease.pull)]

    def on_seen(self, sender: Incarnation, seen: CommitSeen) -> None:
        """Forget a committed lease whose reader got its OK."""
        lease = self._committed.get(seen.lease_id)
        if lease and (sender, seen.key, seen.attempt) == (
            lease.reader,
            lease.key,
            lease.attempt,
        ):
            self._forget(lease, LeaseEvent.SEEN)

    def on_ended(self, sender: Incarnation, ended: Ended) -> list[LeaseAction]:
        """The reader ended its part: so does its live lease."""
        lease = self._live.get(self._by_key.get(ended.key, 0))
        if lease is None or lease.reader != sender or lease.state is LeaseState.ORPHANED:
            return []
        return self.end(lease.lease_id, ended.reason)

    def on_peer_lost(self, now_ms: int, reader: Incarnation) -> list[LeaseAction]:
        """A reader's stream ended for good or its epoch is over: end and forget its leases.

        Sealed hand-overs wait for another reader for ``take_over_ms``.
        """
        for lease in [one for one in self._committed.values() if one.reader == reader]:
            self._forget(lease, LeaseEvent.READER_LOST)
        actions: list[LeaseAction] = []
        for lease in [one for one in self._live.values() if one.reader == reader]:
            waits = lease.seal is not None and not lease.is_pull and self._take_over_ms > 0
            if not waits:
                actions += self.die(lease, LeaseEvent.READER_LOST, "peer_lost")
            elif lease.state is not LeaseState.ORPHANED:
                lease.state = LEASE_TABLE.move(lease.state, LeaseEvent.ORPHAN)
                self._orphans[lease.lease_id] = now_ms + self._take_over_ms
        return actions

    # -- what the caller sees -----------------------------------------------------------------

    def knows(self, key: RequestKey) -> bool:
        """Whether a lease of the generation is live, or committed and remembered."""
        return key in self._by_key or any(one.key == key for one in self._committed.values())

    def oldest(self) -> int | None:
        """Id of the live lease opened first: the one to end under memory pressure."""
        return next(iter(self._by_key.values()), None)

    def statuses(self) -> list[LeaseStatus]:
        """All leases, live ones first."""
        return [one.status() for one in (*self._live.values(), *self._committed.values())]

    @property
    def num_live(self) -> int:
        """Leases that hold blocks."""
        return len(self._live)

    @property
    def num_blocks_held(self) -> int:
        """Holds of all live leases; a block under two leases counts twice."""
        return sum(lease.num_blocks for lease in self._live.values())

    # -- for the leases that readers ask for ----------------------------------------------------

    def create(
        self,
        now_ms: int,
        key: RequestKey,
        reader: Incarnation,
        event: LeaseEvent,
        blocks: GroupBlocks,
        question: Question | None = None,
    ) -> Lease:
        """A new live lease, born by ``event``, which holds and lists ``blocks``."""
        self._last_id += 1
        lease = Lease(
            self._last_id,
            key,
            reader,
            now_ms + self._ttl_ms,
            LEASE_TABLE.born(event),
            question,
        )
        self.holds.hold(lease.holder, ())
        self._live[lease.lease_id] = lease
        self._take(lease, blocks)
        return lease

    def is_hand_over(self, lease: Lease) -> None:
        """From now on the lease is the live one of its generation."""
        self._by_key[lease.key] = lease.lease_id

    def find(self, lease_id: int) -> Lease | None:
        """A lease that is live, or committed and remembered."""
        return self._live.get(lease_id) or self._committed.get(lease_id)

    def hand_over_of(self, key: RequestKey) -> Lease | None:
        """The live lease of a generation's hand-over."""
        return self._live.get(self._by_key.get(key, 0))

    def die(self, lease: Lease, event: LeaseEvent, reason: str) -> list[LeaseAction]:
        """Dead first, reused after: nobody can commit it any more when its blocks go."""
        lease.state = LEASE_TABLE.move(lease.state, event)
        self._no_longer_live(lease)
        LEASE_TABLE.leave(lease.state, LeaseEvent.FORGET)
        self.holds.drop(lease.holder)
        actions: list[LeaseAction] = [LeaseEnded(lease.key, lease.lease_id, reason, lease.pull)]
        if event is not LeaseEvent.READER_LOST:
            actions.append(Send(lease.reader, lease.dead()))
        return actions

    # -- inside -------------------------------------------------------------------------------

    def _take(self, lease: Lease, blocks: GroupBlocks) -> bool:
        """Hold, then list; False if there is nothing to take."""
        taken = [block for pairs in blocks for _, block in pairs]
        if not taken:
            return False
        positions = [{position for position, _ in pairs} for pairs in blocks]
        for group, (fresh, pairs) in enumerate(zip(positions, blocks, strict=True)):
            if len(fresh) < len(pairs) or not fresh.isdisjoint(lease.offered.get(group, ())):
                raise InvariantViolation(f"{lease.key}: a position of group {group} offered twice")
        self.holds.add_to_hold(lease.holder, taken)
        for group, (fresh, pairs) in enumerate(zip(positions, blocks, strict=True)):
            if fresh:
                lease.offered.setdefault(group, set()).update(fresh)
                lease.ranges += ranges_of(group, pairs)
        return True

    def _refresh(self, now_ms: int, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        lease.expires_ms = now_ms + self._ttl_ms
        self._live[lease.lease_id] = self._live.pop(lease.lease_id)

    def _judge(self, lease: Lease, sender: Incarnation, commit: Commit) -> tuple[LeaseEvent, str]:
        """Which row of the table a Commit fits, and why if it is a NO."""
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

    def _no_longer_live(self, lease: Lease) -> None:
        del self._live[lease.lease_id]
        self._orphans.pop(lease.lease_id, None)
        if self._by_key.get(lease.key) == lease.lease_id:
            del self._by_key[lease.key]

    def _forget(self, lease: Lease, event: LeaseEvent) -> None:
        LEASE_TABLE.leave(lease.state, event)
        del self._committed[lease.lease_id]
