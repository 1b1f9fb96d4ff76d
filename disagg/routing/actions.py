"""What enters the router's core, and the actions that leave it."""

from dataclasses import field

from disagg.errors import DisaggError, RequestError
from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation
from disagg.messages.outputs import FinishReason
from disagg.messages.registration import WorkerInfo
from disagg.messages.sampling import SamplingParams, TokenLogprobs
from disagg.messages.session import ToWorkerMessage
from disagg.routing.revisions import Revision
from disagg.routing.slo import NO_SLO, Slo


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A validated, tokenised and hashed request."""

    request_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    hashes: tuple[bytes, ...] = field(repr=False)
    cache_salt: bytes = field(repr=False)
    sampling: SamplingParams
    tenant: str = ""
    """Whose it is; "" where nobody is told from anybody else. Where requests wait, tenants take
    turns."""
    claim: bytes = field(default=b"", repr=False)
    """Name of the request at all routers (`Claim`): it supersedes an earlier one of the same name.
    Empty where the client gave it none."""
    priority: int = 0
    """Where several requests of its tenant wait: lower goes first, then who came first."""
    slo: Slo = NO_SLO
    hand_over: bool | None = None
    """True: planned by the rule that hands over all that fits; False: by the one that hands over
    nothing; None: by the deployment's policy."""
    group: int = 0
    """Number of the client's request, where several requests here make it up; 0: it is the only
    one."""
    num_following: int = 0
    """Requests of its group that come later: a place is kept for each."""
    received_ms: int | None = None
    """When its client had sent it, before it was prepared; None: when it is handed to the core."""
    accepted_ms: int | None = None
    """For its claim: when its group was received; None: ``received_ms``."""
    revision: Revision | None = None
    """For which it was prepared, the one that `RouterCore.assign` gave. Where there is none, or it
    has gone meanwhile, the core assigns one and names the blocks as that does."""

    @property
    def num_prompt_numbers(self) -> int:
        """Log-probabilities of the prompt that are requested."""
        wanted = self.sampling.num_prompt_logprobs
        return 0 if wanted is None else len(self.token_ids) * (1 + wanted)

    def check(self) -> None:
        """Refuse what no worker can compute.

        Raises:
            RequestError: naming the field.
        """
        for param, bad in (
            ("prompt", not self.token_ids),
            ("max_tokens", self.sampling.max_tokens < 0),
        ):
            if bad:
                raise RequestError(f"{param} is empty", param=param, request_id=self.request_id)
        if self.revision is None:
            return
        if len(self.hashes) * self.revision.contract.hash_block_tokens > len(self.token_ids):
            # Surplus hashes would publish blocks under names that are not theirs.
            raise RequestError(
                f"{len(self.hashes)} hashes are more than {len(self.token_ids)} tokens fill",
                param="hashes",
                request_id=self.request_id,
            )


# --- actions


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a session and a KV event stream to this incarnation."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the streams to this incarnation.

    Attributes:
        silent: it has said nothing for too long; else its session has ended by itself.
    """

    worker: Incarnation
    silent: bool = False


@dataclass(frozen=True, slots=True)
class RefuseRegistration:
    """Answer the registration with this error."""

    error: DisaggError


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send on the worker's session, in the order given."""

    worker: Incarnation
    message: ToWorkerMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the client, in order and without gaps; the last one has a reason.

    Nobody changes one: it is hashed and shared.
    """

    request_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = field(default=(), repr=False)
    """With the first one, if requested: of each token of the prompt; its first one has none."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error; nothing more is delivered."""

    request_id: str
    error: DisaggError


@dataclass(frozen=True, slots=True)
class WorkerReset:
    """What one worker made of a reset of the prefix caches."""

    worker: Incarnation
    num_forgotten: int = 0
    """Blocks that could be found until then."""
    in_use: tuple[tuple[str, int], ...] = ()
    """Blocks that are still held, by kind of holder."""
    error: str = ""
    """Why its cache was not reset, or may not have been."""


@dataclass(frozen=True, slots=True)
class CacheResetEnded:
    """Every worker has answered a reset of the prefix caches, or is not waited for any more."""

    number: int
    workers: tuple[WorkerReset, ...]

    @property
    def complete(self) -> bool:
        """Whether all of them forgot what they had."""
        return not any(one.error for one in self.workers)


RouterAction = (
    Connect | Disconnect | RefuseRegistration | ToWorker | Deliver | Fail | CacheResetEnded
)
