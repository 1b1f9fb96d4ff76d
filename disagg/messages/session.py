"""Messages between the router and a worker.

Downstream `Submit` and `Cancel` travel on one ordered stream, so a cancel never overtakes its
submit. Upstream, one `StepOutputs` per engine step carries the tokens of all its sequences.
"""

from enum import StrEnum

from disagg.messages.frozen import dataclass
from disagg.messages.identity import RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.reports import PrefillReport, TransferReport
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import PeerAddress, Submit


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
    preempted: bool = False
    """It goes back instead: its memory was taken away, and it waits until there is some again."""


def receipt_of(submit: Submit) -> PrefillProgress:
    """What a worker sends when a submit arrives, before it works on it.

    A request whose first step ends the process is known by it: the worker was alive with it.
    """
    return PrefillProgress(submit.key, 0)


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
