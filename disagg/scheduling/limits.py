"""The numbers that a worker's core decides by, and those it counts."""

from dataclasses import dataclass

STEPS_MAX = 2
"""Steps in flight at once at a worker: one runs, the next one is planned."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of one worker; every queue, wait and retry of the core has one here."""

    max_model_tokens: int
    max_step_tokens: int
    max_sequences: int
    max_waiting: int
    handover_share_max: float
    reserve_timeout_ms: int
    reserve_passes_max: int
    reservation_ttl_ms: int
    lease_ttl_ms: int
    committed_max: int
    commit_repeat_ms: int
    read_stuck_ms: int
    blocks_per_read_max: int
    quarantine_share_max: float
    steps_max: int = 1
    """Steps in flight at once; the coordinator's must be the same."""
    take_over_ms: int = 0
    checksums: bool = False
    """Offers carry the checksum of each block, and readers compare it."""
    drain_ms: int = 0
    tier_copies_max: int = 4
    """Reads and writes of one tier that are under way at once, each."""
    blocks_per_tier_copy_max: int = 64
    tier_write_share_max: float = 0.125
    """Share of the pool that tiers may copy out at once."""

    @property
    def progress_ms(self) -> int:
        """How often those who wait are shown at most that something goes on."""
        return max(1, min(1_000, self.lease_ttl_ms // 4, self.reservation_ttl_ms // 4))


class Counters:
    """Monotonic counts by name.

    Attributes:
        counts: so far.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str, by: int = 1) -> None:
        """Count ``by`` more under a name."""
        self.counts[name] = self.counts.get(name, 0) + by
