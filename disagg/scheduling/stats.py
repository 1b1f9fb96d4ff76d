"""A worker's core from outside: load, counters, self-check."""

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from disagg.errors import InvariantViolation
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.registration import GroupInfo
from disagg.messages.stats import RouterLoad, WorkerStats
from disagg.messages.step_times import StepTimes
from disagg.messages.submit import Role
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.sequence import Sequence

NO_COUNTS: Mapping[str, int] = MappingProxyType({})
NO_TIERS: Mapping[str, Mapping[str, int]] = MappingProxyType({})


def worker_stats(
    core: WorkerCore,
    tier_counts: Mapping[str, Mapping[str, int]] = NO_TIERS,
    more_counts: Mapping[str, int] = NO_COUNTS,
    step_times: StepTimes | None = None,
) -> WorkerStats:
    """Load and counters of a worker at this moment.

    ``tier_counts`` are what its tiers count by themselves, by tier and name, ``more_counts`` what
    its shell does, ``step_times`` what it has measured.
    """
    batcher, inbound = core.batcher, core.inbound
    counters = core.counters.counts | {
        "preemptions": batcher.num_preemptions,
        "reservations_refused": core.prefill_side.num_refusals,
        "checksum_mismatches": core.inbound.num_mismatches,
        **more_counts,
    }
    for tier, counts in tier_counts.items():
        counters.update({f"tier_{name}_{tier}": number for name, number in counts.items()})
    to_prefill = list(_to_prefill(core))
    return WorkerStats(
        num_waiting=(
            len(batcher.waiting)
            + len(core.prefill_side.backing_off)
            + len(core.decode_side.awaiting)
        ),
        num_running=len(batcher.running),
        num_prefill_tokens_queued=sum(seq.num_uncomputed for seq in to_prefill),
        num_blocks_usable=core.kv.num_usable_blocks,
        num_blocks_free=core.kv.num_free_blocks,
        num_leases=core.leases.num_live,
        num_reservations=len(core.decode_side.pulls),
        num_inbound=len(inbound.statuses()),
        num_blocks_quarantined=inbound.num_blocks_quarantined,
        ready=core.ready,
        draining=core.draining,
        counters=tuple(sorted(counters.items())),
        residency=core.kv.pool.residency.histograms() if core.kv.pool.residency else (),
        loads=_loads(core, to_prefill),
        step_times=step_times,
        num_prompts_queued=len(to_prefill),
        num_decoding=sum(
            seq.num_uncomputed <= 1 and seq.role is not Role.PREFILL for seq in core.batcher.running
        ),
    )


def group_infos(layout: KVCacheLayout) -> tuple[GroupInfo, ...]:
    """What a worker's registration says of its groups."""
    return tuple(
        GroupInfo(
            kind=group.spec.kind,
            block_tokens=group.spec.block_tokens,
            window_tokens=group.spec.window_tokens,
            num_layers=len(group.layers),
            useful_bytes=layout.useful_bytes(group.group),
        )
        for group in layout.groups
    )


def _loads(core: WorkerCore, to_prefill: list[Sequence]) -> tuple[RouterLoad, ...]:
    """What goes on here for each router."""
    requests = Counter(
        seq.key.router for seq in core.sequences.values() if seq.role is not Role.PREFILL
    )
    tokens: Counter[str] = Counter()
    for seq in to_prefill:
        tokens[seq.key.router] += seq.num_uncomputed
    routers = sorted({key.router for key in core.sequences})
    return tuple(RouterLoad(router, requests[router], tokens[router]) for router in routers)


def _to_prefill(core: WorkerCore) -> Iterator[Sequence]:
    """Whose prompts are still to be computed here, wherever they stand."""
    yield from (
        *core.batcher.waiting,
        *core.prefill_side.backing_off,
        *core.prefill_side.reserving.values(),
        *(pull.seq for pull in core.prefix_pull.pulls.values()),
        *(load.seq for load in core.tiers.loads.values() if load.seq is not None),
    )
    yield from (seq for seq in core.batcher.running if seq.num_uncomputed > 1)


def check_core(core: WorkerCore) -> None:
    """Verify the coordinator's invariants, the bounds on load, and where every sequence is.

    Raises:
        InvariantViolation: a bug of ours.
    """
    core.kv.check()
    check_load(core)
    placed = [
        *(seq.key for seq in core.batcher.waiting),
        *(seq.key for seq in core.batcher.running),
        *(seq.key for seq in core.prefill_side.backing_off),
        *core.prefill_side.reserving,
        *core.decode_side.awaiting,
        *core.decode_side.pulls,
        *core.prefix_pull.pulls,
        *core.tiers.loads,
    ]
    if sorted(placed) != sorted(core.sequences):
        raise InvariantViolation(f"placed {sorted(placed)}, known {sorted(core.sequences)}")


def check_load(core: WorkerCore) -> None:
    """Verify the bounds on sequences, queues and hand-overs.

    Raises:
        InvariantViolation: a bug of ours.
    """
    limits = core.limits
    queued = (*core.batcher.waiting, *core.prefill_side.backing_off)
    num_queued = sum(not seq.preempted for seq in queued)
    loads = {
        "sequences": (core.generations.num_holding, limits.max_sequences),
        # Who steps back from a reservation or a pull was counted when it came.
        "queued": (num_queued, limits.max_waiting + limits.max_sequences),
        "awaited hand-overs": (len(core.decode_side.awaiting), limits.max_waiting),
    }
    for what, (load, bound) in loads.items():
        if load > bound:
            raise InvariantViolation(f"{load} {what}, at most {bound}")
    if core.budget.exceeded:
        taken, bound = core.budget.num_blocks, core.budget.blocks_max
        raise InvariantViolation(f"{taken} blocks of hand-overs, at most {bound}")
