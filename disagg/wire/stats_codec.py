"""A worker's load on the wire: for its routers, and in its status."""

from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram, RouterLoad, WorkerStats
from disagg.messages.step_times import NUM_FEATURES, PAIRS, StepTimes
from disagg.wire.checks import NAME_CHARS_MAX, malformed
from disagg.wire.v1 import session_pb2

COUNTERS_MAX = 1024
SUM_MAX = 1e40
"""Far above what a worker can measure; sums of all workers, and their products, stay finite."""


def stats_to_wire(stats: WorkerStats) -> session_pb2.WorkerStats:
    """Encode a worker's load; also part of its status."""
    return session_pb2.WorkerStats(
        num_waiting=stats.num_waiting,
        num_running=stats.num_running,
        num_prefill_tokens_queued=stats.num_prefill_tokens_queued,
        num_blocks_usable=stats.num_blocks_usable,
        num_blocks_free=stats.num_blocks_free,
        num_leases=stats.num_leases,
        num_reservations=stats.num_reservations,
        num_inbound=stats.num_inbound,
        num_blocks_quarantined=stats.num_blocks_quarantined,
        ready=stats.ready,
        draining=stats.draining,
        loads=[
            session_pb2.RouterLoad(
                router_id=load.router,
                num_requests=load.num_requests,
                num_prefill_tokens=load.num_prefill_tokens,
            )
            for load in stats.loads
        ],
        counters=dict(stats.counters),
        residency=[
            session_pb2.ResidencyHistogram(name=one.name, counts=one.counts, sum_ms=one.sum_ms)
            for one in stats.residency
        ],
        step_times=None if stats.step_times is None else _step_times_to_wire(stats.step_times),
        num_prompts_queued=stats.num_prompts_queued,
        num_decoding=stats.num_decoding,
        stalled=stats.stalled,
    )


def stats_from_wire(wire: session_pb2.WorkerStats) -> WorkerStats:
    """Decode a worker's load; counters come sorted by name."""
    return WorkerStats(
        num_waiting=wire.num_waiting,
        num_running=wire.num_running,
        num_prefill_tokens_queued=wire.num_prefill_tokens_queued,
        num_blocks_usable=wire.num_blocks_usable,
        num_blocks_free=wire.num_blocks_free,
        num_leases=wire.num_leases,
        num_reservations=wire.num_reservations,
        num_inbound=wire.num_inbound,
        num_blocks_quarantined=wire.num_blocks_quarantined,
        ready=wire.ready,
        draining=wire.draining,
        loads=tuple(
            RouterLoad(load.router_id, load.num_requests, load.num_prefill_tokens)
            for load in wire.loads
        ),
        counters=_counters_from_wire(wire),
        residency=tuple(_residency_from_wire(one) for one in wire.residency),
        step_times=_step_times_from_wire(wire.step_times) if wire.HasField("step_times") else None,
        num_prompts_queued=(
            wire.num_prompts_queued if wire.HasField("num_prompts_queued") else None
        ),
        num_decoding=wire.num_decoding if wire.HasField("num_decoding") else None,
        stalled=wire.stalled,
    )


def _counters_from_wire(wire: session_pb2.WorkerStats) -> tuple[tuple[str, int], ...]:
    if len(wire.counters) > COUNTERS_MAX:
        raise malformed(wire, "counters", f"has more than {COUNTERS_MAX} entries")
    if any(len(name) > NAME_CHARS_MAX for name in wire.counters):
        raise malformed(wire, "counters", f"has a name of more than {NAME_CHARS_MAX} characters")
    return tuple(sorted(wire.counters.items()))


def _residency_from_wire(wire: session_pb2.ResidencyHistogram) -> ResidencyHistogram:
    if len(wire.counts) != len(RESIDENCY_BOUNDS_MS) + 1:
        raise malformed(wire, "counts", f"has {len(wire.counts)} entries")
    return ResidencyHistogram(wire.name, tuple(wire.counts), wire.sum_ms)


def _step_times_to_wire(times: StepTimes) -> session_pb2.StepTimes:
    return session_pb2.StepTimes(
        num_steps=times.num_steps,
        products=times.products,
        timed=times.timed,
        step_tokens_max=times.step_tokens_max,
    )


def _step_times_from_wire(wire: session_pb2.StepTimes) -> StepTimes:
    for name, sums, num in (
        ("products", wire.products, len(PAIRS)),
        ("timed", wire.timed, NUM_FEATURES),
    ):
        if len(sums) != num:
            raise malformed(wire, name, f"has {len(sums)} entries")
        if not all(0 <= one <= SUM_MAX for one in sums):
            raise malformed(wire, name, f"has a sum that is no number of 0 to {SUM_MAX:g}")
    return StepTimes(wire.num_steps, tuple(wire.products), tuple(wire.timed), wire.step_tokens_max)
