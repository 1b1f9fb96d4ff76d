"""Load and counters of a worker, told to all routers alike."""

from disagg.messages.frozen import dataclass
from disagg.messages.step_times import StepTimes

RESIDENCY_BOUNDS_MS = (
    *(10, 50, 100, 500, 1_000, 5_000, 10_000, 30_000),
    *(60_000, 120_000, 300_000, 600_000, 1_800_000, 3_600_000),
)
"""Upper bounds of the counts of a `ResidencyHistogram`; one more count is of all above them."""


@dataclass(frozen=True, slots=True)
class ResidencyHistogram:
    """Times of the cached blocks that a worker observed, so far."""

    name: str
    """``lifetime``, ``idle`` or ``reuse_gap``."""
    counts: tuple[int, ...]
    """Per bound of `RESIDENCY_BOUNDS_MS` those up to it and above the one before; then the rest."""
    sum_ms: int


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What a worker has going on for one router."""

    router: str
    num_requests: int
    """That are decoded there, or wait for it."""
    num_prefill_tokens: int
    """Prompt tokens that are still to be computed there."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Load and counters of a worker; sent when they changed, at most once a heartbeat."""

    num_waiting: int
    num_running: int
    num_prefill_tokens_queued: int
    num_blocks_usable: int
    num_blocks_free: int
    num_leases: int
    num_reservations: int
    num_inbound: int
    num_blocks_quarantined: int
    ready: bool
    counters: tuple[tuple[str, int], ...] = ()
    """Monotonic counts by name, e.g. ``commits_refused``."""
    residency: tuple[ResidencyHistogram, ...] = ()
    """How long contents stay in the prefix cache; none where no block is observed."""
    draining: bool = False
    """It takes no new work and ends when what it has is over; then it is not ready either."""
    loads: tuple[RouterLoad, ...] = ()
    """Of every router that has anything going on there."""
    step_times: StepTimes | None = None
    """What its steps have taken; None from a worker that does not measure them."""
    num_prompts_queued: int | None = None
    """That the queued tokens are of, begun ones included; None from earlier releases."""
    num_decoding: int | None = None
    """Of the running ones, that are given token after token here; None from earlier releases."""
    stalled: bool = False
    """Its step takes longer than ``scheduling.step_slow_ms``; it may not end any more."""
