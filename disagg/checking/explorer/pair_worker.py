"""A whole worker as the explorer sees it: the production core, thawed, moved and frozen again."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from disagg.checking.explorer.snapshots import Snapshots
from disagg.kv.blocks.free_blocks import UncachedBlocks
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage
from disagg.scheduling.actions import CheckTransport, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.stats import check_load
from disagg.scheduling.step import Step
from disagg.transfer.actions import Send
from disagg.transfer.owner.states import LeaseState

ASK_TIMEOUT_MS, LEASE_TTL_MS, RESERVATION_TTL_MS = 10, 20, 30
TAKE_OVER_MS = 15
"""Everything else happens at 0 ms, so that each of them can come first."""


class Facts(NamedTuple):
    """What the world needs to know of a worker."""

    me: Incarnation
    keys: tuple[Any, ...]
    """Generations it works on."""
    step: Step | None
    """In flight."""
    num_leases: int
    orphans: bool
    """Leases that wait for another reader."""
    held: frozenset[int]
    cached: tuple[tuple[int, int], ...]
    """(position, block) of everything the prefix cache offers."""
    inbound_held: frozenset[int]
    """Blocks that READs may write."""
    at_rest: bool
    """Nothing is held and nothing goes on."""
    holds_nothing: bool
    """No block, promise, lease or reservation; somebody may wait."""
    asking: bool
    repeats: bool
    granted: bool
    reading: bool
    backing_off: bool
    preemptible: bool
    """A prefill that is leased runs."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One move of a worker: its number afterwards, and what it wants done."""

    core: int
    actions: tuple[WorkerAction, ...]
    launched: Step | None


class Workers:
    """All states of workers that were ever seen, by number; each move is made only once."""

    def __init__(
        self,
        layout: KVCacheLayout,
        hasher: BlockHasher,
        *,
        num_blocks: int,
        passes_max: int,
        share: float,
        mutate: Callable[[WorkerCore], None],
        positions: dict[bytes, int],
        take_over_ms: int = 0,
    ) -> None:
        self._positions = positions
        self._layout = layout
        self._hasher = hasher
        self._num_blocks = num_blocks
        self._mutate = mutate
        self._limits = WorkerLimits(
            max_model_tokens=8,
            max_step_tokens=1,
            max_sequences=4,
            max_waiting=4,
            handover_share_max=share,
            reserve_timeout_ms=ASK_TIMEOUT_MS,
            reserve_passes_max=passes_max,
            reservation_ttl_ms=RESERVATION_TTL_MS,
            lease_ttl_ms=LEASE_TTL_MS,
            committed_max=2,
            commit_repeat_ms=0,
            read_stuck_ms=ASK_TIMEOUT_MS,
            blocks_per_read_max=1,
            quarantine_share_max=1.0,
            take_over_ms=take_over_ms,
        )
        self._constants: list[Any] = [layout, hasher, self._limits, *layout.groups]
        self._snapshots = Snapshots(self._constants)
        self._frozen: list[tuple[bytes, tuple[type, ...]]] = []
        self._number: dict[tuple[bytes, tuple[type, ...]], int] = {}
        self.facts: list[Facts] = []
        self._moves: dict[tuple[Any, ...], Moved] = {}
        self._minds: dict[tuple[int, Incarnation, PeerMessage], bool] = {}

    def start(self, me: Incarnation) -> int:
        """A worker that has just started."""
        kv = KVCacheCoordinator(
            self._layout,
            self._num_blocks,
            max_model_tokens=self._limits.max_model_tokens,
            max_step_tokens=self._limits.max_step_tokens,
        )
        core = WorkerCore(me, self._layout, kv, self._hasher, self._limits, _no_delay)
        kv.pool._emit = _ignore
        kv.events._read_hashes = _no_hashes
        self._mutate(core)
        return self._freeze(core)

    def thaw(self, number: int) -> WorkerCore:
        """A copy to look at."""
        core = self._snapshots.thaw(self._frozen[number])
        assert isinstance(core, WorkerCore)
        return core

    def move(self, number: int, method: str, *args: object) -> Moved:
        """Call a method of the core, then launch a step if the engine is idle."""
        call = (number, method, *args)
        moved = self._moves.get(call)
        if moved is None:
            core = self.thaw(number)
            if method == "preempt":
                actions = [*core.on_step_done(*args), *_preempt(core)]  # type: ignore[arg-type]
            elif method == "evict":
                actions = _evict(core)
            else:
                actions = getattr(core, method)(*args)
            step, more = core.next_step(0)
            core.kv.check()
            check_load(core)
            moved = self._moves[call] = Moved(self._freeze(core), (*actions, *more), step)
        return moved

    def minds(self, number: int, stranger: Incarnation, message: PeerMessage) -> bool:
        """Whether a message from a life nobody knows does more than get an answer."""
        call = (number, stranger, message)
        if call not in self._minds:
            moved = self.move(number, "on_peer_message", 0, stranger, message)
            after = self.thaw(moved.core)
            # One number per owner ever heard, and requests withdrawn before they arrive.
            after.inbound._lease_seen.pop(stranger, None)
            after.lease_answers.on_peer_lost(stranger)
            answers = all(
                isinstance(one, CheckTransport) or (isinstance(one, Send) and one.to == stranger)
                for one in moved.actions
            )
            same = self.same(self.thaw(number), after)
            self._minds[call] = not (answers and same)
        return self._minds[call]

    def same(self, one: WorkerCore, other: WorkerCore) -> bool:
        """Whether two workers behave alike."""
        return self._freeze(one) == self._freeze(other)

    def _freeze(self, core: WorkerCore) -> int:
        _make_canonical(core)
        frozen = self._snapshots.freeze(core)
        number = self._number.get(frozen)
        if number is None:
            number = self._number[frozen] = len(self._frozen)
            self._frozen.append(frozen)
            self.facts.append(_facts(core, self._positions))
        return number


def _facts(core: WorkerCore, positions: dict[bytes, int]) -> Facts:
    batcher, kv = core.batcher, core.kv
    step = batcher._in_flight[0] if batcher._in_flight else None
    inbound = core.inbound.statuses()
    inbound_held = [
        block
        for holder, blocks in kv.pool.holders().items()
        if isinstance(holder, tuple) and holder[0] == "inbound"
        for block in blocks
    ]
    num_granted, num_leases = core.decode_side._reservations.num_granted, core.leases.num_live
    all_free = kv.num_available_blocks == kv.num_usable_blocks
    return Facts(
        core.me,
        tuple(core.sequences),
        step,
        num_leases,
        any(one.state is LeaseState.ORPHANED for one in core.leases.statuses()),
        frozenset(filter(kv.pool.num_holds, range(1, kv.pool.num_blocks))),
        tuple(
            (positions[value], block)
            for group in range(len(kv.layout.groups))
            for value, block in kv.pool.index(group).items()
        ),
        frozenset(inbound_held),
        not core.sequences and step is None and all_free,
        all_free and not num_granted and not num_leases,
        bool(core.prefill_side.reserving or core.lease_requests._entries),
        any(entry.repeats for entry in core.inbound._entries.values()),
        num_granted > 0,
        any(entry.num_reads_in_progress for entry in inbound),
        bool(core.prefill_side.backing_off),
        any(seq.lease_id is not None for seq in batcher.running),
    )


def _make_canonical(core: WorkerCore) -> None:
    """Forget what no decision depends on: counters, clocks, the order of free blocks."""
    core.counters.counts.clear()
    core.prefill_side.num_refusals = core.batcher.num_preemptions = 0
    for seq in core.batcher.running:  # the engines here keep no tables: each step carries all
        seq.sent_tables = None
    core.batcher._ended.clear()
    if not core.batcher.step_in_flight:
        core.batcher._next_step_id = 0
    for seq in core.prefill_side.backing_off:
        seq.retry_at_ms = 0
    for entry in core.inbound._entries.values():
        entry.repeat_ms = entry.posted_ms = entry.done_ms = entry.sealed_ms = 0
    core.kv.events._events.clear()
    core.kv.events.next_seq = 0
    pool, steps = core.kv.pool, core.kv._steps
    if not steps._given_up:
        steps._num_records = 0
    for counts in vars(pool).values():
        if isinstance(counts, dict) and all(isinstance(block, int) for block in counts):
            for block, count in sorted(counts.items()):
                del counts[block]
                dict.__setitem__(counts, block, count)
    free = sorted(pool._uncached)
    pool._uncached = UncachedBlocks(1, 1)
    pool._uncached.add(free)
    cached = pool._cached_free
    if cached._stale:  # entries that are passed over; of a block's the last one counts
        last = reversed(dict.fromkeys(reversed(cached._queue)))
        cached._queue = deque(block for block in last if block in cached)
        cached._stale.clear()


def _preempt(core: WorkerCore) -> list[WorkerAction]:
    """Lack of memory took the youngest prefill's blocks, as in `Batcher.build_step`."""
    prefills = [seq for seq in core.batcher.running if seq.lease_id is not None]
    if not prefills:
        return []
    victim = max(prefills, key=lambda seq: seq.arrival)
    core.batcher.preempt(victim)
    core.prefill_side.give_back(victim, "preempted")
    core.queue(victim)
    return core._out.take()


def _evict(core: WorkerCore) -> list[WorkerAction]:
    """Others needed every free block for a moment."""
    pool = core.kv.pool
    pool.release(pool.allocate(pool.num_free))
    return []


def _no_delay(passes: int) -> int:
    return 0


def _ignore(event: object) -> None:
    """Routing data is not modelled: it is never trusted."""


def _no_hashes() -> tuple[tuple[bytes, ...], ...]:
    return ()
