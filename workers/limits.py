"""From a worker's options to the numbers that its core decides by."""

from disagg.scheduling.limits import STEPS_MAX, WorkerLimits
from disagg.workers.options import WorkerOptions

TIER_COPY_BYTES = 32 << 20
"""Copied to or from a tier at once; a part of it is what a sequence waits for at least."""


def worker_limits(options: WorkerOptions, max_model_tokens: int, block_bytes: int) -> WorkerLimits:
    """The limits of a worker with these options.

    Args:
        options: of the worker.
        max_model_tokens: longest prompt plus answer, by options and engine.
        block_bytes: of a KV block of its engine.
    """
    return WorkerLimits(
        max_model_tokens=max_model_tokens,
        max_step_tokens=options.max_step_tokens,
        max_sequences=options.max_sequences,
        max_waiting=options.max_waiting,
        handover_share_max=options.handover_share_max,
        reserve_timeout_ms=options.reserve_timeout_ms,
        reserve_passes_max=options.reserve_passes_max,
        reservation_ttl_ms=options.reservation_ttl_ms,
        lease_ttl_ms=options.lease_ttl_ms,
        take_over_ms=options.take_over_ms,
        checksums=options.checksums,
        committed_max=options.committed_max,
        commit_repeat_ms=options.commit_repeat_ms,
        read_stuck_ms=options.read_stuck_ms,
        blocks_per_read_max=max(1, options.read_handle_bytes_max // block_bytes),
        quarantine_share_max=options.quarantine_share_max,
        steps_max=STEPS_MAX,
        drain_ms=options.drain_ms,
        blocks_per_tier_copy_max=max(1, TIER_COPY_BYTES // block_bytes),
    )
