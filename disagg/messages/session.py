"""Messages between the router and a worker.

Downstream `Submit` and `Cancel` travel on one ordered stream, so a cancel never overtakes its
submit. Upstream, one `StepOutputs` per engine step carries the tokens of all its sequences.
"""

from dataclasses import field
from enum import StrEnum

from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SamplingParams
from disagg.messages.step_times import StepTimes


class Role(StrEnum):
    """What a worker does for one generation of a request."""

    LOCAL = "local"
    """Prefill and decode here; no lease, no reservation."""
    PREFILL = "prefill"
    """Prefill here, hand over to the peer."""
    DECODE = "decode"
    """Reserve, pull from the peer, decode."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where the other worker of a hand-over is reached, and in which life."""

    incarnation: Incarnation
    address: str
    """host:port of its gRPC service."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Where a prefill may find more of its prefix; never trusted, and optional."""

    owner: PeerAddress
    num_tokens: int
    """What the router believes usable there."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one generation of a request on a worker.

    What belongs to the client (tokens, salt) is in no repr, here and wherever else it is kept: a
    repr ends in logs and errors.
    """

    key: RequestKey
    role: Role
    token_ids: tuple[int, ...] = field(repr=False)
    """Prompt, plus the tokens already emitted when the router plans anew."""
    hashes: tuple[bytes, ...] = field(repr=False)
    """Chain values of the full hash blocks of ``token_ids`` (hashed once, by the router)."""
    cache_salt: bytes = field(repr=False)
    sampling: SamplingParams
    """``max_tokens`` counts from the end of ``token_ids``."""
    peer: PeerAddress | None = None
    pull: PullPlan | None = None
    """For roles that prefill."""
    take_over: RequestKey | None = None
    """For a decode: the generation whose sealed lease it takes over. ``token_ids`` then ends with
    the token that the lease carries, and nothing is prefilled for it."""
    traceparent: str = field(default="", repr=False)
    """W3C trace context of the router's span; "" where nothing is traced."""

    @property
    def asks(self) -> tuple[PeerAddress, ...]:
        """The workers that one who prefills will ask: for a reservation, for a prefix."""
        found = self.peer, self.pull.owner if self.pull is not None else None
        return tuple(peer for peer in found if peer is not None)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a generation; unknown ones are ignored."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached KV; a worker answers each by a `PrefixCacheReset`, to all routers."""

    number: int
    """The router that began it counts them, from 1."""
    router: str = ""
    """Who began it; another router that has heard of it sends it on to its workers."""


@dataclass(frozen=True, slots=True)
class WorkerIdClaimed:
    """Another process registered under this worker's id and was refused."""

    claimant: PeerAddress


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work; what goes on may end, or moves to other workers."""

    timeout_ms: int
    """After so long nothing goes on any more."""
    ends: bool
    """The worker ends then. Else it stays without work, until it is ended or called back."""


@dataclass(frozen=True, slots=True)
class CallOffDrain:
    """Take work again, unless the drain was to end the worker; no effect without one."""


CLAIM_BYTES = 16
"""Length of the name in a `Claim`: a digest, so that no client's words are kept at workers."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request is the one that is served under a name.

    Of two requests that claim one name, at any routers, the earlier one is superseded: its
    generations end at this worker, and its router is told by `Superseded`.
    """

    key: RequestKey
    name: bytes
    """`CLAIM_BYTES` bytes; what a client gives equal names to is one request, sent again."""
    accepted_ms: int = 0
    """When its router accepted it, by that router's clock, since the Unix epoch."""
    again: bool = False
    """It was claimed before and is planned anew."""
    waited_ms: int = 0
    """At its router since that accepted it: it is older than its claim."""


ToWorkerMessage = (
    Submit | Cancel | ResetPrefixCache | WorkerIdClaimed | Claim | Drain | CallOffDrain
)


class EndReason(StrEnum):
    """Why a worker ended its part of a generation without finishing it."""

    CANCELLED = "cancelled"
    PEER_ENDED = "peer_ended"
    """The other worker of the hand-over ended its part first; its own report has the reason."""
    PEER_LOST = "peer_lost"
    LEASE_DEAD = "lease_dead"
    COMMIT_REFUSED = "commit_refused"
    READ_FAILED = "read_failed"
    READ_STUCK = "read_stuck"
    RESERVE_REFUSED = "reserve_refused"
    """The decode worker had no room, again and again; sent by the prefill worker."""
    TAKE_OVER_REFUSED = "take_over_refused"
    """The lease was gone, or there was no room for its take-over."""
    EXPIRED = "expired"
    """A reservation stood still up to its bound; sent by the decode worker, not at fault."""
    CAPACITY = "capacity"
    """Its queue is full."""
    STEP_FAILED = "step_failed"
    NO_TOKEN = "no_token"
    """None can follow by the request's own grammar: it fails, as it would anywhere."""
    REJECTED = "rejected"
    """It cannot end there, whatever else is going on: only a larger worker may serve it."""
    DRAINING = "draining"
    """The worker is about to end; nobody is at fault."""


@dataclass(frozen=True, slots=True)
class PartEnded:
    """A worker ended its part before the request finished; the router plans anew or fails it."""

    key: RequestKey
    reason: EndReason
    message: str = ""
    num_kept_tokens: int = 0
    """Tokens whose KV is kept there for a while, for a decode worker that takes the generation
    over: all that the sender sent, but the last one. 0: nothing is kept."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """A prefill or a transfer went on; renews the router's patience when the figure grew."""

    key: RequestKey
    num_computed_tokens: int
    """Positions of ``Submit.token_ids`` whose KV is there, cached and pulled ones included. While
    blocks are read, by the reader: the same share of the positions as of the blocks."""


def receipt_of(submit: Submit) -> PrefillProgress:
    """What a worker sends when a submit arrives, before it works on it.

    A request whose first step ends the process is known by it: the worker was alive with it.
    """
    return PrefillProgress(submit.key, 0)


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
    """From the first READ posted to the last one done."""
    exposed_ms: int
    """From the seal's arrival to the confirmation of the commit."""
    kind: TransferKind = TransferKind.HANDOVER
    num_tokens: int = 0
    """The boundary that a prefix pull reached."""
    failed: str = ""
    """Why a prefix pull was given up; what it lacked was computed."""


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


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """What a worker forgot: no later request finds any KV that was computed before this."""

    number: int
    num_forgotten: int
    """Blocks that could be found until then."""
    in_use: tuple[tuple[str, int], ...] = ()
    """Blocks that are still held, by kind of holder: their memory is free when that ends."""
    refused: str = ""
    """Why nothing was forgotten; "" if all was."""
    router: str = ""
    """Who began it."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another request has claimed the name of this one, which has ended at the sender."""

    key: RequestKey
    """As it was claimed; the request may have been planned anew since."""


ToRouterMessage = (
    StepOutputs
    | PartEnded
    | PrefillProgress
    | PrefillReport
    | TransferReport
    | WorkerStats
    | PrefixCacheReset
    | Superseded
)


def router_of(message: ToRouterMessage) -> str:
    """The router that a message is for; "" for what all of them are told."""
    match message:
        case StepOutputs(outputs, prompt_logprobs):
            return (outputs or prompt_logprobs)[0].key.router
        case PrefixCacheReset() | WorkerStats():
            return ""
        case _:
            return message.key.router
