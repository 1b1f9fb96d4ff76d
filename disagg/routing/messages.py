"""What enters the router's core and the wishes that leave it."""

from dataclasses import dataclass

from disagg.errors import DisaggError
from disagg.kv.contract import Contract
from disagg.scheduling.messages import FinishReason, RouterMessage
from disagg.scheduling.sampling import SamplingParams, TokenLogprobs
from disagg.transfer.identity import Incarnation


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What routing needs to know of one KV cache group."""

    kind: str
    block_tokens: int
    window_tokens: int
    """0 where the kind has none."""
    num_layers: int
    useful_bytes: int
    """Of one block."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's registration."""

    incarnation: Incarnation
    address: str
    role: str
    model: str
    contract: Contract
    groups: tuple[GroupInfo, ...]
    max_model_tokens: int
    handover_tokens_max: int
    """Longest prompt whose hand-over fits this worker's share of the pool."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A validated, tokenised and hashed request."""

    request_id: str
    token_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    cache_salt: bytes
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """How much of a prompt's KV one worker holds, in tokens."""

    worker: Incarnation
    role: str
    usable_tokens: int
    """Longest prefix on which all groups agree."""
    group_tokens: tuple[int, ...]
    """Each group on its own."""


# --- actions


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a session and a KV event stream to this incarnation."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the streams to this incarnation."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send on the worker's session, in the order given."""

    worker: Incarnation
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the client, in order and without gaps; the last one has a reason."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error; nothing more is delivered."""

    request_id: str
    error: DisaggError


RouterAction = Connect | Disconnect | ToWorker | Deliver | Fail
