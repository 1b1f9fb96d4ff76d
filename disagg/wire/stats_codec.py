"""A worker's load on the wire: for its routers, and in its status."""

from disagg.messages.session import (
    RESIDENCY_BOUNDS_MS,
    ResidencyHistogram,
    RouterLoad,
    WorkerStats,
)
from disagg.wire.checks import malformed
from disagg.wire.v1 import session_pb2


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
        counters=tuple(sorted(wire.counters.items())),
        residency=tuple(_residency_from_wire(one) for one in wire.residency),
    )


def _residency_from_wire(wire: session_pb2.ResidencyHistogram) -> ResidencyHistogram:
    if len(wire.counts) != len(RESIDENCY_BOUNDS_MS) + 1:
        raise malformed(wire, "counts", f"has {len(wire.counts)} entries")
    return ResidencyHistogram(wire.name, tuple(wire.counts), wire.sum_ms)
