"""Record of one request, readable while it lives and for a while afterwards."""

from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation
from disagg.messages.reports import PrefillTimes, TransferReport
from disagg.routing.estimates.considered import Considered
from disagg.routing.estimates.estimate import Estimate


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One try: who was chosen and why, what they reported, how it ended."""

    generation: int
    started_ms: int
    prefill: Incarnation
    decode: Incarnation
    """Equal to ``prefill`` for a local plan."""
    prefill_role: str
    """As which the prefill worker is registered."""
    decode_role: str
    reason: str
    """Why these workers were chosen."""
    num_prompt_tokens: int
    """The prompt plus the tokens accepted from earlier generations."""
    expected_hit_tokens: int
    """What the index promised at the prefill worker; may have been stale."""
    hit_tokens: int | None
    """What the prefill worker found in its cache; None until it reported."""
    computed_tokens: int | None
    pulled_tokens: int | None
    """What it pulled from another worker's cache; computed are the rest."""
    uncached_common_tokens: int | None
    """Of those computed: a prefix that full attention had cached, and windows or states had not."""
    prefill_ms: int | None
    """When the prefill worker's report arrived."""
    prefill_times: PrefillTimes | None
    """Where the time of the prefill went, as its worker reported."""
    transfer: TransferReport | None
    """Report of the hand-over; None until it was committed, and for a local plan."""
    pull: TransferReport | None
    """Report of the prefix pull, committed or given up; None where there was none."""
    num_tokens: int
    """Tokens accepted from this generation."""
    cause: str
    """Why it was given up for another plan, "" when it was not."""
    estimate: Estimate | None = None
    """What was expected when it was planned; None: too little was measured."""
    considered: tuple[Considered, ...] = ()
    """The plans that were weighed, this one among them."""

    @property
    def local(self) -> bool:
        """Prefill and decode on one worker."""
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The life of a request; times are the caller's milliseconds."""

    request_id: str
    revision: str
    """At which it is, or was, served: all of its answer's tokens are of that one."""
    num_prompt_tokens: int
    seed: int
    """Of its sampling: another request with it has the same tokens."""
    received_ms: int
    """When its client had sent it."""
    submitted_ms: int
    """When it was prepared, and waited for its turn."""
    first_token_ms: int | None
    finished_ms: int | None
    """None while the request lives."""
    num_tokens: int
    """Tokens delivered to the client."""
    generations: tuple[GenerationRecord, ...]
    """In order; every one but the last was given up for its ``cause``."""
    outcome: str
    """"" while it lives; then ``stop``, ``length``, ``cancelled`` or ``failed``."""
    error: str
    """Why the request failed or was cancelled, "" when it did not and was not."""
    refused: tuple[Considered, ...] = ()
    """Of a request that was shed: the plans that were weighed then, none of which was in time."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first prefill did not compute (the usage figure)."""
        if not self.generations:
            return 0
        first = self.generations[0]
        return (first.hit_tokens or 0) + (first.pulled_tokens or 0)
