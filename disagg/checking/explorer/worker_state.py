"""What the explorer knows of the inside of a worker: all of it stands here.

How a core is made, what of its state no decision depends on, and what a world must see of it.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from disagg.checking.explorer.memory import Running
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.state import (
    ASK_TIMEOUT_MS,
    LEASE_TTL_MS,
    RESERVATION_TTL_MS,
    TAKE_OVER_MS,
    Facts,
)
from disagg.checking.explorer.tables_worker import TablesWorker
from disagg.checking.explorer.tokens import Vocabulary
from disagg.kv.blocks.free_blocks import CachedBlocks, UncachedBlocks
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation
from disagg.messages.session import PrefixCacheReset
from disagg.scheduling.actions import TierKey, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.stats import check_load
from disagg.scheduling.tiers.index import TierSetting
from disagg.transfer.owner.states import LeaseState

NEVER_MS = 1_000


def limits_of(setting: Setting) -> WorkerLimits:
    """Of each worker."""
    return WorkerLimits(
        max_model_tokens=8,
        max_step_tokens=1,
        max_sequences=setting.max_sequences,
        max_waiting=setting.max_waiting,
        handover_share_max=setting.share,
        reserve_timeout_ms=ASK_TIMEOUT_MS,
        reserve_passes_max=setting.passes_max,
        reservation_ttl_ms=RESERVATION_TTL_MS,
        lease_ttl_ms=LEASE_TTL_MS,
        committed_max=setting.committed_max,
        # In order nothing is lost: what is repeated would only come twice.
        commit_repeat_ms=NEVER_MS if setting.delivery == "in order" else 0,
        read_stuck_ms=ASK_TIMEOUT_MS,
        steps_max=setting.steps_max,
        blocks_per_read_max=1,
        quarantine_share_max=setting.quarantine_share,
        take_over_ms=TAKE_OVER_MS,
        checksums=setting.checksums,
        blocks_per_tier_copy_max=1,
        tier_write_share_max=1.0,
    )


def tiers_of(setting: Setting) -> tuple[TierSetting, ...]:
    """Of each worker."""
    return () if setting.tier is None else (TierSetting("tier", setting.tier, 100),)


def new_core(
    me: Incarnation,
    layout: KVCacheLayout,
    hasher: BlockHasher,
    limits: WorkerLimits,
    num_blocks: int,
    cls: type[WorkerCore] = WorkerCore,
    tiers: tuple[TierSetting, ...] = (),
) -> WorkerCore:
    """A worker that has just started."""
    kv = KVCacheCoordinator(
        layout,
        num_blocks,
        max_model_tokens=limits.max_model_tokens,
        max_step_tokens=limits.steps_max * limits.max_step_tokens,
        steps_max=limits.steps_max,
    )
    core = cls(me, layout, kv, hasher, limits, _no_delay, tiers)
    kv.pool._emit = kv.events.append if tiers else _ignore
    kv.events._read_hashes = _no_hashes
    return core


def store(core: WorkerCore, hasher: BlockHasher, prompts: Iterable[Sequence[int]]) -> None:
    """Its tier has had all blocks of some prompts from the start."""
    for prompt in prompts:
        hashes: list[bytes] = []
        hasher.extend(hashes, prompt)
        for manager in core.kv.managers:
            values = [one for each in manager.chain(hashes) for one in manager.stored_values(each)]
            core.tiers.index.add(0, [(manager.group, one) for one in values])


def stored_in(core: WorkerCore) -> list[TierKey]:
    """What it believes that its tier has."""
    return sorted(core.tiers.index._keys[0]) if core.tiers.has_any else []


def facts_of(core: WorkerCore, vocabulary: Vocabulary) -> Facts:
    """As it is now."""
    batcher, kv = core.batcher, core.kv
    inbound = core.inbound.statuses()
    num_granted, num_leases = core.decode_side._reservations.num_granted, core.leases.num_live
    all_free = kv.num_available_blocks == kv.num_usable_blocks
    in_flight = _in_flight(core, vocabulary)
    facts = Facts(
        me=core.me,
        keys=tuple(core.sequences),
        running=in_flight[0] if in_flight else None,
        queued=in_flight[1:],
        num_leases=num_leases,
        lending=bool(core.tiers.lending._asked),
        orphans=any(one.state is LeaseState.ORPHANED for one in core.leases.statuses()),
        held=frozenset(filter(kv.pool.num_holds, range(1, kv.pool.num_blocks))),
        cached=tuple(
            (vocabulary.contents[value], block)
            for group in range(len(kv.layout.groups))
            for value, block in kv.pool.cache.index(group).items()
        ),
        inbound_held=frozenset(
            block
            for holder, blocks in kv.pool.holders().items()
            if isinstance(holder, tuple) and holder[0] == "inbound"
            for block in blocks
        ),
        at_rest=not core.sequences and not in_flight and all_free and _is_reset(core),
        holds_nothing=all_free and not num_granted and not num_leases,
        asking=bool(core.prefill_side.reserving or core.lease_requests._entries),
        repeats=any(entry.repeats for entry in core.inbound._entries.values()),
        granted=num_granted > 0,
        reading=any(entry.num_reads_in_progress for entry in inbound),
        backing_off=bool(core.prefill_side.backing_off),
        preemptible=any(seq.lease_id is not None for seq in batcher.running),
        memory_awaited=batcher.preempted_waiting,
        has_passes=all(
            2 * seq.passes <= core.limits.reserve_passes_max for seq in core.sequences.values()
        ),
    )
    return facts._replace(**core.seen()) if isinstance(core, TablesWorker) else facts


def _is_reset(core: WorkerCore) -> bool:
    """Every reset is answered, and every tier empty that has not said why it is not."""
    clearing, tiers = core.tiers._clearing, core.tiers.infos
    pending = [one for one in core.tiers.index.closed if tiers[one].name not in clearing._errors]
    return not (clearing._answers or pending)


def _in_flight(core: WorkerCore, vocabulary: Vocabulary) -> tuple[Running, ...]:
    size = core.kv.layout.hash_block_tokens
    return tuple(
        Running(
            step,
            tuple(
                vocabulary.extended(
                    tuple(seq.submit.token_ids),
                    seq.key.generation,
                    -(-(part.start + len(part.token_ids)) // size) * size,
                )
                for part, seq in zip(step.slices, sequences, strict=True)
            ),
        )
        for step, sequences in core.batcher._in_flight
    )


def make_canonical(core: WorkerCore) -> None:
    """Forget what no decision depends on: counters, clocks, the order of free blocks."""
    core.counters.counts.clear()
    core.prefill_side.num_refusals = core.batcher.num_preemptions = 0
    core.inbound.num_mismatches = 0
    send_whole_tables(core)
    core.batcher._ended.clear()
    _number_steps(core)
    for seq in core.prefill_side.backing_off:
        seq.retry_at_ms = 0
    for entry in core.inbound._entries.values():
        entry.posted_ms = entry.done_ms = entry.sealed_ms = 0
        entry.num_bursts = entry.burst_ms = entry.reading_ms = 0
        entry.repeat_ms = core.limits.commit_repeat_ms
    core.tiers.writes._look_at_events()
    core.tiers.writes._next_event = 0
    answers = core.tiers._clearing._answers
    for router, answer in answers.items():
        answers[router] = PrefixCacheReset(answer.number, 0, router=router)
    core.kv.events._events.clear()
    core.kv.events.next_seq = 0
    pool, steps = core.kv.pool, core.kv._steps
    if not steps._given_up:
        steps._num_records = 0
    for counts in (*vars(pool).values(), *vars(pool.slack).values()):
        if isinstance(counts, dict) and all(isinstance(block, int) for block in counts):
            for block, count in sorted(counts.items()):
                del counts[block]
                dict.__setitem__(counts, block, count)
    free = sorted(pool._uncached)
    pool._uncached = UncachedBlocks(1, 1)
    pool._uncached.add(free)
    cached = pool._cached_free
    assert isinstance(cached, CachedBlocks)
    if cached._stale:  # entries that are passed over; of a block's the last one counts
        last = reversed(dict.fromkeys(reversed(cached._queue)))
        cached._queue = deque(block for block in last if block in cached)
        cached._stale.clear()


def send_whole_tables(core: WorkerCore) -> None:
    """The engines here keep no tables: each step carries all of them."""
    for seq in core.batcher.running:
        seq.sent_tables = None


def _number_steps(core: WorkerCore) -> None:
    """Of several steps in flight the oldest has number 0; with none nobody waits for their ends."""
    batcher, holds = core.batcher, core.kv._steps
    if batcher._in_flight and core.limits.steps_max == 1:
        return  # it has the number that it was launched with, as in the counts of the worlds
    batcher._lets_steps_end &= bool(batcher._in_flight)
    batcher._next_step_id = len(batcher._in_flight)
    numbers: dict[Hashable, int] = {
        step.step_id: n for n, (step, _) in enumerate(batcher._in_flight)
    }
    if all(number == step_id for step_id, number in numbers.items()):
        return
    batcher._in_flight = deque(
        (replace(step, step_id=numbers[step.step_id]), sequences)
        for step, sequences in batcher._in_flight
    )
    holds._keys = {numbers[step]: keys for step, keys in holds._keys.items()}
    for holder, steps in holds._given_up.items():
        holds._given_up[holder] = {numbers[step] for step in steps}


def forget_stranger(core: WorkerCore, stranger: Incarnation) -> None:
    """One number per owner ever heard, and requests withdrawn before they arrive."""
    core.inbound._lease_seen.pop(stranger, None)
    core.lease_answers.on_peer_lost(stranger)


def preempt(core: WorkerCore) -> list[WorkerAction]:
    """Lack of memory took the youngest prefill's blocks, as in `Batcher.build_step`."""
    prefills = [seq for seq in core.batcher.running if seq.lease_id is not None]
    if not prefills:
        return []
    victim = max(prefills, key=lambda seq: seq.arrival)
    core.batcher.preempt(victim)
    core.prefill_side.give_back(victim, "preempted")
    core.parts.queue(victim)
    return core._out.take()


def check(core: WorkerCore) -> None:
    """Counts that must add up, and bounds on load, whatever happens."""
    core.kv.check()
    check_load(core)


def evict(core: WorkerCore) -> list[WorkerAction]:
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
