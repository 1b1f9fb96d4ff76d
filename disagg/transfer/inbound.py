"""The reader's side of the lease protocol: pulls that are believed only after their commit.

Sans-IO: time comes in, actions go out. The table is driven by one thread. Messages from another
incarnation than the owner's, or about a generation without a live transfer, change nothing.
"""

from collections.abc import Sequence
from itertools import chain

from disagg.errors import InvariantViolation
from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.peer import Commit, CommitAnswer, CommitSeen, Ended, Offers
from disagg.transfer.actions import (
    InboundAction,
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    InboundFailure,
    InboundPartial,
    InboundStats,
    PostRead,
    Send,
)
from disagg.transfer.holds import BlockHolds
from disagg.transfer.inbound_states import INBOUND_TABLE, InboundEvent, InboundState
from disagg.transfer.inbound_transfer import InboundStatus, InboundTransfer
from disagg.transfer.offer_list import OfferList, ProtocolBreach, Run, in_pieces
from disagg.transfer.reads import Read, ReadsInProgress


class InboundTable:
    """Inbound transfers of this incarnation.

    At most one live transfer per key; earlier ones of the key may still be draining. Sizes
    follow from the destinations, which the caller allocated before.

    Args:
        me: this worker; attempts count up within its epoch.
        holds: the block pool; a transfer holds under ``("inbound", key, n)``.
        commit_repeat_ms: a Commit is repeated at this interval until it is answered.
        ask_repeat_ms: offers are asked for at this interval until the list is complete.
        read_stuck_ms: a READ in progress longer fails its transfer and quarantines its blocks.
        blocks_per_read_max: blocks in one READ.
    """

    def __init__(
        self,
        me: Incarnation,
        holds: BlockHolds,
        *,
        commit_repeat_ms: int,
        ask_repeat_ms: int,
        read_stuck_ms: int,
        blocks_per_read_max: int,
    ) -> None:
        self.me = me
        self.holds = holds
        self._commit_repeat_ms = commit_repeat_ms
        self._ask_repeat_ms = ask_repeat_ms
        self._read_stuck_ms = read_stuck_ms
        self._blocks_per_read_max = blocks_per_read_max
        self._last_serial = 0
        self._last_attempt = 0
        self._entries: dict[int, InboundTransfer] = {}
        self._live: dict[RequestKey, int] = {}
        self._reads = ReadsInProgress()
        self._lease_seen: dict[Incarnation, int] = {}
        """Highest lease id seen of each owner, until it is lost."""

    # -- the reader's own moves ---------------------------------------------------------------

    def begin(
        self,
        now_ms: int,
        key: RequestKey,
        owner: Incarnation,
        destinations: Sequence[Sequence[tuple[int, int]]],
        lease_id: int = 0,
    ) -> None:
        """Hold all destinations and wait for the owner's lease.

        Call it before the reservation's yes leaves: leases known by now count as older ones.

        Args:
            now_ms: the time.
            key: the generation.
            owner: the incarnation that will offer; nobody else is listened to.
            destinations: per group, (position, block id) of every block the lease must offer.
            lease_id: of the lease, where it is known by its answer to a question.

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
            OfferList(destinations),
            self._lease_seen.get(owner, 0),
            now_ms + self._ask_repeat_ms,
            lease_id=lease_id,
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

    def abort(self, now_ms: int, key: RequestKey, reason: str) -> list[InboundAction]:
        """Give a live transfer up; its destinations stay held until no READ is in progress.

        No `InboundFailed` is returned, as the caller knows; nothing if there is no transfer.
        The caller tells the owner (`Ended`).
        """
        entry = self._of(key)
        if entry is None:
            return []
        if INBOUND_TABLE.allows(entry.state, InboundEvent.FINISH):
            self.finish(key)
            return [InboundDrained(key, entry.num_blocks)]
        return self._fail(entry, InboundFailure.PEER_ENDED, reason)[1:]

    # -- what happens -------------------------------------------------------------------------

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> list[InboundAction]:
        """Post READs for what is new; ask at a gap; fail if the lease is dead or lies."""
        self._lease_seen[sender] = max(self._lease_seen.get(sender, 0), offers.lease_id)
        entry = self._of(offers.key)
        if entry is None or entry.owner != sender or entry.is_over:
            return []
        oldest = entry.lease_id or entry.lease_floor + 1
        if offers.lease_id < oldest:
            return []
        if offers.dead or (entry.lease_id and offers.lease_id > entry.lease_id):
            # One generation has one live lease: a newer one says that ours is dead.
            return self._fail(entry, InboundFailure.LEASE_DEAD, "the owner ended its lease")
        fresh = entry.state is InboundState.RESERVED
        event = InboundEvent.LEASE_KNOWN if fresh else InboundEvent.OFFERS
        if not INBOUND_TABLE.allows(entry.state, event):
            return []
        entry.state = INBOUND_TABLE.move(entry.state, event)
        entry.lease_id = offers.lease_id
        if entry.offers.has_gap(offers):
            return self._ask_gap(now_ms, entry)
        sealed_before = entry.offers.seal is not None
        runs = entry.offers.take(offers)
        if isinstance(runs, ProtocolBreach):
            return self._on_lie(entry, runs)
        if entry.offers.seal and not sealed_before:
            entry.sealed_ms = now_ms
        actions = self._post(now_ms, entry, runs)
        if entry.offers.seal and not entry.offers.all_listed:
            actions += self._ask_gap(now_ms, entry)
        return actions + self._progress(now_ms, entry)

    def on_read_done(self, now_ms: int, read_id: int, error: str = "") -> list[InboundAction]:
        """A READ is terminal; ``error`` is "" when it is DONE. Unknown ids are ignored."""
        ended = self._reads.end(read_id)
        if ended is None:
            return []
        read, owner_free = ended
        entry = self._entries.get(read.inbound)
        actions: list[InboundAction] = []
        if entry is not None and INBOUND_TABLE.allows(entry.state, InboundEvent.READ_DONE):
            entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.READ_DONE)
            entry.reads.discard(read_id)
            entry.done_ms = now_ms
            if entry.state is InboundState.DRAINING:
                actions += self._drained(entry)
            else:
                if error:  # the others go on: what arrives while the lease lives is of use
                    entry.failed += [place for run in read.runs for place in run.places]
                    entry.error = entry.error or error
                actions += self._progress(now_ms, entry)
        return actions + (self._resume(now_ms, read.owner) if owner_free else [])

    def on_commit_answer(
        self, now_ms: int, sender: Incarnation, answer: CommitAnswer
    ) -> list[InboundAction]:
        """Only an OK for the current attempt makes the blocks valid; NO fails the transfer."""
        entry = self._of(answer.key)
        if (
            entry is None
            or not self._is_current(entry, sender, answer)
            or not INBOUND_TABLE.allows(entry.state, InboundEvent.OK)
        ):
            return []
        if not answer.ok or entry.offers.seal is None:
            return self._fail(entry, InboundFailure.COMMIT_REFUSED, answer.reason)
        event = InboundEvent.OK_PARTLY if entry.failed else InboundEvent.OK
        entry.state = INBOUND_TABLE.move(entry.state, event)
        stats = InboundStats(
            entry.num_reads,
            entry.offers.num_blocks,
            max(0, entry.done_ms - entry.posted_ms),
            max(0, now_ms - entry.sealed_ms),
        )
        seen = Send(sender, CommitSeen(answer.key, answer.lease_id, answer.attempt))
        if entry.failed:
            failed = tuple(sorted(entry.failed))
            return [InboundPartial(entry.key, failed, entry.lost, stats), seen]
        return [InboundCommitted(entry.key, entry.offers.seal, stats), seen]

    def on_ended(self, now_ms: int, sender: Incarnation, ended: Ended) -> list[InboundAction]:
        """The owner ended its part: fail, unless the commit got through before."""
        entry = self._of(ended.key)
        if entry is None or entry.owner != sender or entry.is_over:
            return []
        return self._fail(entry, InboundFailure.PEER_ENDED, ended.reason)

    def on_peer_lost(self, now_ms: int, owner: Incarnation) -> list[InboundAction]:
        """An owner's stream ended for good or its epoch is over; READs drain by themselves."""
        self._lease_seen.pop(owner, None)
        actions: list[InboundAction] = []
        for entry in self._live_from(owner):
            if not entry.is_over:
                actions += self._fail(entry, InboundFailure.PEER_LOST, f"{owner} is gone")
        return actions

    def on_stream_opened(self, now_ms: int, owner: Incarnation) -> list[InboundAction]:
        """The stream to an owner was re-opened: ask or commit again at once."""
        return [one for entry in self._live_from(owner) for one in self._repeat(now_ms, entry)]

    def tick(self, now_ms: int) -> list[InboundAction]:
        """Repeat what is due; fail transfers with stuck READs and quarantine their blocks."""
        actions: list[InboundAction] = []
        for read in self._reads.take_stuck(now_ms - self._read_stuck_ms):
            entry = self._entries[read.inbound]
            if entry.state is not InboundState.DRAINING:
                group, at = read.first.group, read.first.position
                since = f"in progress since {read.posted_ms} ms"
                message = f"the READ of block {group}:{at} (group:position) is {since}"
                actions += self._fail(entry, InboundFailure.READ_STUCK, message, group, at)
        for entry in [self._entries[serial] for serial in self._live.values()]:
            if entry.repeat_ms <= now_ms:
                actions += self._repeat(now_ms, entry)
        return actions

    # -- what the caller sees -----------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do; None if nothing is due by itself."""
        live = (self._entries[serial] for serial in self._live.values())
        due = [entry.repeat_ms for entry in live if entry.repeats]
        if self._reads.oldest_ms is not None:
            due.append(self._reads.oldest_ms + self._read_stuck_ms)
        return min(due, default=None)

    @property
    def peers_paused(self) -> frozenset[Incarnation]:
        """Owners with a stuck READ: nothing new is pulled from them until it is terminal."""
        return self._reads.owners_stuck

    @property
    def num_blocks_quarantined(self) -> int:
        """Destinations held by transfers that failed and have a stuck READ."""
        return sum(self._entries[serial].num_blocks for serial in self._reads.inbounds_stuck)

    @property
    def num_live(self) -> int:
        """Transfers that may still become valid, or are valid and not finished."""
        return len(self._live)

    def statuses(self) -> list[InboundStatus]:
        """All transfers, draining ones included."""
        return [
            InboundStatus(one.key, one.owner, one.state, one.num_blocks, len(one.reads))
            for one in self._entries.values()
        ]

    # -- inside -------------------------------------------------------------------------------

    def _of(self, key: RequestKey) -> InboundTransfer | None:
        return self._entries.get(self._live.get(key, 0))

    def _live_from(self, owner: Incarnation) -> list[InboundTransfer]:
        entries = (self._entries[serial] for serial in self._live.values())
        return [entry for entry in entries if entry.owner == owner]

    def _post(self, now_ms: int, entry: InboundTransfer, runs: list[Run]) -> list[InboundAction]:
        if entry.owner in self.peers_paused:
            entry.waiting += runs
            return []
        actions: list[InboundAction] = []
        for piece in in_pieces(runs, self._blocks_per_read_max):
            read_id = self._reads.add(Read(entry.serial, entry.owner, piece, now_ms))
            entry.reads.add(read_id)
            entry.posted_ms = entry.posted_ms if entry.num_reads else now_ms
            entry.num_reads += 1
            src = tuple(chain.from_iterable(run.sources for run in piece))
            dst = tuple(chain.from_iterable(run.dst for run in piece))
            actions.append(PostRead(read_id, entry.key, entry.owner, src, dst))
        return actions

    def _progress(self, now_ms: int, entry: InboundTransfer) -> list[InboundAction]:
        """Commit once everything the seal promises was offered, fits, and is read."""
        if entry.state is not InboundState.READING or not self._all_listed(entry):
            return []
        lie = self._incomplete(entry)
        if lie:
            return self._on_lie(entry, lie)
        if entry.waiting or not self._reads_done(entry):
            return []
        if entry.failed and len(entry.failed) == entry.num_blocks:
            return self._fail(entry, InboundFailure.READ_FAILED, entry.lost, *entry.failed[0])
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.COMPLETE)
        self._last_attempt += 1
        entry.attempt = Attempt(self.me.epoch, self._last_attempt)
        return self._repeat(now_ms, entry)

    def _all_listed(self, entry: InboundTransfer) -> bool:
        return entry.offers.all_listed

    def _incomplete(self, entry: InboundTransfer) -> ProtocolBreach | None:
        seal = entry.offers.seal
        return entry.offers.incomplete(seal) if seal else None

    def _reads_done(self, entry: InboundTransfer) -> bool:
        return not entry.reads

    def _is_current(
        self, entry: InboundTransfer, sender: Incarnation, answer: CommitAnswer
    ) -> bool:
        return (sender, answer.lease_id, answer.attempt) == (
            entry.owner,
            entry.lease_id,
            entry.attempt,
        )

    def _repeat(self, now_ms: int, entry: InboundTransfer) -> list[InboundAction]:
        if not entry.repeats:
            return []
        INBOUND_TABLE.move(entry.state, InboundEvent.REPEAT)
        message = entry.repeated
        committing = isinstance(message, Commit)
        entry.repeat_ms = now_ms + (self._commit_repeat_ms if committing else self._ask_repeat_ms)
        return [Send(entry.owner, message)]

    def _ask_gap(self, now_ms: int, entry: InboundTransfer) -> list[InboundAction]:
        """Ask for a gap once; every later Offers over the same gap would ask again."""
        if entry.asked == len(entry.offers.ranges):
            return []
        entry.asked = len(entry.offers.ranges)
        return self._repeat(now_ms, entry)

    def _resume(self, now_ms: int, owner: Incarnation) -> list[InboundAction]:
        actions: list[InboundAction] = []
        for entry in self._live_from(owner):
            runs, entry.waiting = entry.waiting, []
            actions += self._post(now_ms, entry, runs)
        return actions

    def _on_lie(self, entry: InboundTransfer, lie: ProtocolBreach) -> list[InboundAction]:
        message = f"{entry.owner} broke the protocol: {lie.problem}"
        return self._fail(entry, InboundFailure.READ_FAILED, message, lie.group, lie.position)

    def _fail(
        self,
        entry: InboundTransfer,
        reason: InboundFailure,
        message: str,
        group: int = -1,
        position: int = -1,
    ) -> list[InboundAction]:
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.FAIL)
        del self._live[entry.key]
        entry.waiting = []
        failed = InboundFailed(entry.key, reason, message, group, position)
        return [failed, *self._drained(entry)]

    def _drained(self, entry: InboundTransfer) -> list[InboundAction]:
        """Drop a failed transfer's hold if no READ can land any more."""
        if entry.reads:
            if entry.state is InboundState.FAILED:
                entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.READS_LEFT)
            return []
        INBOUND_TABLE.leave(entry.state, InboundEvent.READS_TERMINAL)
        self._gone(entry)
        return [InboundDrained(entry.key, entry.num_blocks)]

    def _gone(self, entry: InboundTransfer) -> None:
        del self._entries[entry.serial]
        if self._live.get(entry.key) == entry.serial:
            del self._live[entry.key]
        self.holds.drop(entry.holder)
