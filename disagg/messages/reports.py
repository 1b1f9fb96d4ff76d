"""What a worker tells of a generation: what it found, and what was moved for it."""

from enum import StrEnum

from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation, RequestKey


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Where the time of a prefill went, from the arrival of its submit to its report.

    What was lost to a refused reservation or a preemption counts as waiting.
    """

    queue_ms: int
    """For its turn, for good, and for a step once it had what it needs of others."""
    transfer_ms: int
    """For what it needs of others: the reservation elsewhere, a prefix from another worker or from
    a tier."""
    compute_ms: int
    """From then to the first token."""


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefill (or local) part found in its cache; sent when its prefill completes."""

    key: RequestKey
    num_prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    pulled_tokens: int = 0
    """Pulled from another worker's cache, after the own hits."""
    uncached_common_tokens: int = 0
    """Of those computed: a prefix that full attention had cached, and windows or states had not."""
    times: PrefillTimes | None = None
    """None from a worker that does not measure them."""


@dataclass(frozen=True, slots=True)
class GroupTransfer:
    """One KV cache group's share of a committed transfer."""

    group: int
    kind: str
    """``full_attention``, ``sliding_window``, ..."""
    window_tokens: int
    """0 where the kind has none."""
    block_tokens: int
    block_map: str
    """One character per block position: ``p`` pulled, ``h`` hit, ``.`` null, ``n`` new."""
    pulled_blocks: int
    pulled_bytes: int
    """Moved, padding included."""
    useful_bytes: int
    """Of those, what layers of this group use."""
    full_blocks: int
    """Blocks that moving every position would have cost."""
    full_bytes: int


class TransferKind(StrEnum):
    """What a committed transfer moved."""

    HANDOVER = "handover"
    """A prompt from its prefill worker to its decode worker."""
    PREFIX = "prefix"
    """A cached prefix to the worker that prefills."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Sent by the reader when a transfer is committed, or a prefix pull was given up."""

    key: RequestKey
    owner: Incarnation
    groups: tuple[GroupTransfer, ...]
    num_reads: int
    read_ms: int
    """From the first READ posted to the last one done; while blocks are computed, with pauses."""
    exposed_ms: int
    """From the seal's arrival to the confirmation of the commit."""
    kind: TransferKind = TransferKind.HANDOVER
    num_tokens: int = 0
    """The boundary that a prefix pull reached."""
    num_bursts: int = 0
    """Times at which READs began while none was in progress; 0 from earlier releases."""
    reading_ms: int = 0
    """While READs were in progress."""
    failed: str = ""
    """Why a prefix pull was given up; what it lacked was computed."""
