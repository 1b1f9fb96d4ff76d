"""What kind of world a simulation plays; the seed picks one of them."""

from dataclasses import dataclass
from enum import StrEnum

from disagg.kv.shapes.layout import KVCacheLayout


class FaultKind(StrEnum):
    """What can befall the world at an event."""

    KILL = "kill"
    """The worker dies and comes back with a new epoch."""
    CUT = "cut"
    """Its link to the other worker breaks: what is under way is lost, both notice."""
    EXPIRE = "expire"
    """The time to live of all leases it has given is over."""
    PREEMPT = "preempt"
    """Its youngest running sequence loses its blocks, as for lack of memory."""
    CANCEL = "cancel"
    """The clients go away."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault just before the event of that number (from 1)."""

    event: int
    kind: FaultKind
    worker: str = ""
    """Whom it befalls; of a cut link one end."""
    other: str = ""
    """The other end."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a script, in which everything has its number."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Sizes, load and faults of one family of worlds."""

    layout: KVCacheLayout
    roles: tuple[str, ...] = ("prefill", "decode")
    num_blocks: int = 64
    num_requests: int = 20
    prompt_tokens_max: int = 60
    output_tokens_max: int = 12
    num_kills: int = 0
    num_cuts: int = 0
    num_cancels: int = 0
    continued_per_mille: int = 0
    """Requests that go on after an earlier one's answer."""
    pull_tokens_min: int = 8
    wild_pulls_per_mille: int = 0
    """Prefills that are sent to pull from anybody, whatever is there."""
    read_errors_per_mille: int = 0
    read_ms_max: int = 30
    blocks_per_read_max: int = 4
    step_ms_max: int = 10
    lease_ttl_ms: int = 60_000
    time_limit_ms: int = 300_000
    script: tuple[PlannedRequest, ...] = ()
    """In place of ``num_requests`` random ones; each is asked when the one before it has ended."""
    faults: tuple[PlannedFault, ...] = ()
    """Beside the random ones. Events are arrivals of messages, ends of steps and of READs."""
    failing_reads: tuple[int, ...] = ()
    """The READs of these numbers (from 1) fail."""
