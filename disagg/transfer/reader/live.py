"""Inbound transfers that hold destinations, from their beginning until no READ can land."""

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Commit
from disagg.transfer.actions import (
    BlockHolds,
    InboundDrained,
    InboundFailed,
    InboundFailure,
    Outbox,
    Send,
)
from disagg.transfer.checksums import Checksums
from disagg.transfer.reader.offers import Run
from disagg.transfer.reader.reads import Read, ReadsInProgress
from disagg.transfer.reader.states import INBOUND_TABLE, InboundEvent, InboundState
from disagg.transfer.reader.transfer import InboundStatus, InboundTransfer


class LiveTransfers:
    """Inbound transfers of this incarnation, and what holds for all of them: READs, hold, end.

    At most one live transfer per key; earlier ones of the key may still be draining. Sizes
    follow from the destinations, which the caller allocated before.

    Args:
        me: this worker; attempts count up within its epoch.
        holds: the block pool; a transfer holds under ``("inbound", key, n)``.
        out: takes READs, and messages to owners.
        commit_repeat_ms: a Commit is repeated at this interval until it is answered.
        ask_repeat_ms: missing offers are requested at this interval until the list is complete.
        read_stuck_ms: a READ that stands still longer fails its transfer, whose blocks are then in
            quarantine.
        blocks_per_read_max: blocks in one READ.
        progress_ms: an owner is shown at most so often that READs of its lease end.
        checksums: computes those of the blocks read; None: they are believed as they come.

    Attributes:
        num_mismatches: blocks that came with other checksums than they were offered with.
    """

    def __init__(
        self,
        me: Incarnation,
        holds: BlockHolds,
        out: Outbox,
        *,
        commit_repeat_ms: int,
        ask_repeat_ms: int,
        read_stuck_ms: int,
        blocks_per_read_max: int,
        progress_ms: int = 1_000,
        checksums: Checksums | None = None,
    ) -> None:
        self.me = me
        self.holds = holds
        self.out = out
        self._commit_repeat_ms = commit_repeat_ms
        self._ask_repeat_ms = ask_repeat_ms
        self._read_stuck_ms = read_stuck_ms
        self._progress_ms = progress_ms
        self._last_serial = 0
        self._last_attempt = 0
        self._entries: dict[int, InboundTransfer] = {}
        self._live: dict[RequestKey, int] = {}
        self._reads = ReadsInProgress(out, blocks_per_read_max)
        self._checksums = checksums
        self._done: dict[int, Read] = {}
        """READs whose blocks' checksums are being computed."""
        self.num_mismatches = 0
        self._lease_seen: dict[Incarnation, int] = {}
        """Highest lease id seen of each owner, until it is lost."""

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

    def num_blocks_read(self, key: RequestKey) -> int:
        """Blocks of the generation's live transfer whose READs have ended."""
        return self._entries[self._live[key]].num_blocks_arrived

    def statuses(self) -> list[InboundStatus]:
        """Statuses of all transfers, draining ones included."""
        return [one.status() for one in self._entries.values()]

    # -- inside -------------------------------------------------------------------------------

    def _of(self, key: RequestKey) -> InboundTransfer | None:
        serial = self._live.get(key)
        return None if serial is None else self._entries[serial]

    def _live_from(self, owner: Incarnation) -> list[InboundTransfer]:
        entries = (self._entries[serial] for serial in self._live.values())
        return [entry for entry in entries if entry.owner == owner]

    def _post(self, now_ms: int, entry: InboundTransfer, runs: list[Run]) -> None:
        if entry.owner in self.peers_paused:
            entry.waiting += runs
            return
        posted = self._reads.post(now_ms, entry.serial, entry.key, entry.owner, runs)
        entry.posted(now_ms, posted)

    def _resume(self, now_ms: int, owner: Incarnation) -> None:
        for entry in self._live_from(owner):
            runs, entry.waiting = entry.waiting, []
            self._post(now_ms, entry, runs)

    def _repeat(self, now_ms: int, entry: InboundTransfer) -> None:
        if not entry.repeats:
            return
        INBOUND_TABLE.move(entry.state, InboundEvent.REPEAT)
        message = entry.repeated
        committing = isinstance(message, Commit)
        entry.repeat_ms = now_ms + (self._commit_repeat_ms if committing else self._ask_repeat_ms)
        self.out.add(Send(entry.owner, message))

    def _fail(
        self,
        now_ms: int,
        entry: InboundTransfer,
        reason: InboundFailure,
        message: str,
        block: tuple[int, int] | None = None,
    ) -> None:
        self._give_up(entry)
        drained = self._drained(entry)
        entry.listener.failed(now_ms, InboundFailed(entry.key, reason, message, block))
        if drained:
            entry.listener.drained(InboundDrained(entry.key, entry.num_blocks))

    def _give_up(self, entry: InboundTransfer) -> None:
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.FAIL)
        del self._live[entry.key]
        entry.waiting = []

    def _drain(self, entry: InboundTransfer) -> None:
        if self._drained(entry):
            entry.listener.drained(InboundDrained(entry.key, entry.num_blocks))

    def _drained(self, entry: InboundTransfer) -> bool:
        """Drop a failed transfer's hold if no READ can land any more; whether it was dropped."""
        if entry.reads:
            if entry.state is InboundState.FAILED:
                entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.READS_LEFT)
            return False
        INBOUND_TABLE.leave(entry.state, InboundEvent.READS_TERMINAL)
        self._gone(entry)
        return True

    def _gone(self, entry: InboundTransfer) -> None:
        del self._entries[entry.serial]
        if self._live.get(entry.key) == entry.serial:
            del self._live[entry.key]
        self.holds.drop(entry.holder)
