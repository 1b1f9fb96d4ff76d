"""What kind of world a simulation plays; the seed picks one of them."""

from dataclasses import dataclass, field
from enum import StrEnum

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.testing.simulation.symbolic_engine import VOCAB_SIZE
from disagg.testing.simulation.symbolic_tier import SimulatedTier


class FaultKind(StrEnum):
    """What can befall the world at an event."""

    KILL = "kill"
    """The worker dies and comes back with a new epoch."""
    LOSE = "lose"
    """The worker dies and does not come back."""
    STALL = "stall"
    """Its engine stands still: no step ends before ``stall_ms`` are over."""
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
    """A fault just before the event of that number (from 1), or at a time where one is given."""

    event: int
    kind: FaultKind
    worker: str = ""
    """Whom it befalls; of a cut link one end."""
    other: str = ""
    """The other end."""
    at_ms: int | None = None
    stall_ms: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a script, in which everything has its number."""

    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    at_ms: int | None = None
    """When it arrives; None: when the one before it has ended."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Sizes, load and faults of one family of worlds."""

    layout: KVCacheLayout
    roles: tuple[str, ...] = ("prefill", "decode")
    layouts: tuple[KVCacheLayout, ...] = ()
    """By worker, in place of ``layout``: the same model in blocks of other sizes. Their hash blocks
    are equal, and so are the blocks of a state."""
    num_blocks: int = 64
    num_requests: int = 20
    prompt_tokens_max: int = 60
    output_tokens_max: int = 12
    num_kills: int = 0
    num_cuts: int = 0
    num_cancels: int = 0
    num_resets: int = 0
    """Of the prefix caches, at random times."""
    cache_policy: CachePolicy = CachePolicy()  # noqa: RUF009 (frozen)
    continued_per_mille: int = 0
    """Requests that go on after an earlier one's answer."""
    scored_per_mille: int = 0
    """Requests that ask for log-probabilities of their prompts; some of them for no tokens."""
    policy: str = "prefix_then_load"
    """Name of the rule by which the router plans. By default all is handed over that fits: that is
    what faults are to hit."""
    pull_tokens_min: int = 8
    wild_pulls_per_mille: int = 0
    """Prefills that are sent to pull from anybody, whatever is there."""
    read_errors_per_mille: int = 0
    checksums: bool = False
    bit_flips_per_mille: int = 0
    """Blocks of which a READ brings other bytes than there are, and ends well."""
    read_ms_max: int = 30
    blocks_per_read_max: int = 4
    step_ms_max: int = 10
    step_token_us: int = 0
    """Time of a step for each of its tokens, beside the random part."""
    arrivals_ms: int = 2_000
    """The random requests arrive until then."""
    tick_ms: int = 20
    heartbeat_ms: int = 500
    time_limit_ms: int = 300_000
    max_step_tokens: int = 16
    steps_max: int = 2
    num_speculative_tokens: int = 0
    vocab_size: int = VOCAB_SIZE
    """Of few tokens many come again, and drafts are right at times."""
    max_sequences: int = 8
    max_waiting: int = 100
    handover_share_max: float = 0.5
    reserve_timeout_ms: int = 200
    reserve_passes_max: int = 50
    reservation_ttl_ms: int = 5_000
    lease_ttl_ms: int = 60_000
    commit_repeat_ms: int = 50
    read_stuck_ms: int = 2_000
    take_over_ms: int = 200
    replans_max: int = 8
    requests_max: int = 1_000
    request_timeout_ms: int = 60_000
    records_max: int = 1_000
    worker_silent_ms: int = 5_000
    tiers: tuple[SimulatedTier, ...] = ()
    """Of every worker, in order."""
    blocks_per_tier_copy_max: int = 4
    script: tuple[PlannedRequest, ...] = ()
    """In place of ``num_requests`` random ones."""
    faults: tuple[PlannedFault, ...] = ()
    """Beside the random ones. Events are arrivals of messages, ends of steps and of READs."""
    failing_reads: tuple[int, ...] = ()
    """The READs of these numbers (from 1) fail."""
