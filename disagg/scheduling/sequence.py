"""One generation of a request as a worker sees it."""

from collections.abc import Sequence as Tokens
from dataclasses import InitVar, dataclass, field
from enum import StrEnum

from disagg.kv.hashing import BlockHasher
from disagg.kv.sequence import KVSequence
from disagg.messages.identity import RequestKey
from disagg.messages.outputs import FinishReason, PromptLogprobs, SequenceOutput
from disagg.messages.reports import PrefillReport, PrefillTimes
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.scheduling.block_tables import SentTables
from disagg.scheduling.ngrams import NgramIndex


class Phase(StrEnum):
    """Where a sequence stands. Only those of `HOLDING` hold blocks."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    BACKOFF = "backoff"
    """A reservation was refused; holds nothing until its random delay is over."""
    AWAITING_RESERVE = "awaiting_reserve"
    """Decode part: nothing held until the prefill worker reserves."""
    PULLING_PREFIX = "pulling_prefix"
    """Prefill or local part: its prefix is pulled, the rest of its blocks promised."""
    LOADING = "loading"
    """Any part that computes: its prefix is read from tiers, the rest of its blocks promised."""
    RESERVING = "reserving"
    """Prefill part: own blocks promised, answer of the decode worker awaited."""
    PULLING = "pulling"
    """Decode part: blocks reserved; waits for the prefill, the READs, the commit."""
    RUNNING = "running"
    """Computes in steps."""


HOLDING = frozenset(
    {Phase.PULLING_PREFIX, Phase.LOADING, Phase.RESERVING, Phase.PULLING, Phase.RUNNING}
)


@dataclass(slots=True)
class Sequence:
    """Mutable state of one generation; owned by the control thread."""

    submit: Submit
    request: KVSequence
    arrival: int
    """Counts up per worker; the smaller, the older."""
    max_model_tokens: InitVar[int]
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    """Tokens whose KV is in the pool."""
    num_scheduled: int = 0
    """Tokens, not drafts, that are computed or in a step in flight: the next step begins there."""
    num_drafts: int = 0
    """Drafts in the step in flight: before it has ended nobody knows where the next one begins."""
    drafts_from: int = 0
    """With fewer tokens it does not draft: its last drafts were all wrong."""
    ngrams: NgramIndex | None = None
    """None before drafts are looked up for it."""
    preempted: bool = False
    """Lost its blocks while decoding; goes before everybody who has not started."""
    passes: int = 0
    """Reservations refused so far."""
    retry_at_ms: int = 0
    lease_id: int | None = None
    first_unoffered: tuple[int, ...] = ()
    """Hand-over: per group, index of the first block that is lacked and was not offered."""
    hit_tokens: int = 0
    pulled_tokens: int = 0
    pull: PullPlan | None = field(init=False)
    """None once it was tried: a pull is tried once."""
    hit_before_pull: int | None = None
    """Own hit before a pull that brought something: what more is found later was pulled."""
    num_failed_loads: int = 0
    """Times that a tier did not bring what it was believed to have."""
    num_scored: int = 1
    """Tokens of the prompt whose log-probabilities were sent; the first one has none."""
    known_end: int = 0
    """Where its prompt leaves what full attention has cached here, when its turn came."""
    prefill_reported: bool = False
    sent_tables: SentTables | None = None
    """What the engine has of its block tables; None before its first step."""
    arrived_ms: int = 0
    turn_ms: int = 0
    """When it had its turn, the last time."""
    ready_ms: int = 0
    """When it had all that it needs of others after that."""
    computed_from_ms: int = 0
    """When the first step after that was launched."""
    progress_shown_ms: int = 0
    """When it began here, or those who wait for it were last shown that it goes on."""
    scored_end: int = field(init=False)
    """Log-probabilities of the prompt's tokens before it are wanted here; 0: of none."""
    num_prompt_tokens: int = field(init=False)
    num_tokens_max: int = field(init=False)
    """With so many tokens it ends for its length."""
    num_scheduled_max: int = field(init=False)
    """Of more tokens no KV is needed here: the last one it samples is computed elsewhere or not."""

    def __post_init__(self, max_model_tokens: int) -> None:
        self.num_prompt_tokens = len(self.submit.token_ids)
        longest = self.num_prompt_tokens + self.submit.sampling.max_tokens
        self.num_tokens_max = min(longest, max_model_tokens)
        hands_over = self.role is Role.PREFILL
        self.num_scheduled_max = self.num_prompt_tokens if hands_over else self.num_tokens_max - 1
        sampling, is_scored = self.submit.sampling, self.role is not Role.DECODE
        is_scored = is_scored and sampling.num_prompt_logprobs is not None
        self.scored_end = sampling.num_prompt_tokens if is_scored else 0
        self.pull = None if self.is_scored else self.submit.pull

    @property
    def key(self) -> RequestKey:
        """Request id and generation."""
        return self.submit.key

    @property
    def role(self) -> Role:
        """This worker's part in the generation."""
        return self.submit.role

    @property
    def peer(self) -> PeerAddress:
        """The other worker of the hand-over; checked to be there when it was submitted."""
        assert self.submit.peer is not None
        return self.submit.peer

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens known but not yet in the pool; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens that the next step may compute: all known ones, or the one being sampled.

        None while drafts are in flight.
        """
        num_known = len(self.request.token_ids) - self.num_scheduled
        if num_known > 0:
            return num_known
        return int(not self.num_drafts and self.num_scheduled < self.num_scheduled_max)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt's tokens are still to be computed."""
        return self.num_scored < self.scored_end

    @property
    def num_cacheable(self) -> int:
        """Tokens that may come from a cache: of those that do, nobody has the logits."""
        return (self.num_scored if self.is_scored else self.num_tokens) - 1

    def scored_in(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens whose log-probabilities a slice of these positions is to compute."""
        if not self.is_scored:
            return ()
        return tuple(self.request.token_ids[start + 1 : min(end + 1, self.scored_end)])

    def take_scores(self, start: int, scores: Tokens[TokenLogprobs]) -> PromptLogprobs | None:
        """Of what a slice from ``start`` on brought, that which was not sent yet; None if nothing.

        A sequence that was preempted computes some of its prompt again.
        """
        first, self.num_scored = self.num_scored, max(self.num_scored, start + 1 + len(scores))
        new = tuple(scores[first - start - 1 :])
        return PromptLogprobs(self.key, first, new) if new else None

    def begins_at(self, num_computed: int) -> None:
        """So many tokens are in the pool, and none are in a step in flight."""
        self.num_computed = self.num_scheduled = num_computed

    def emit(self, tokens: Tokens[SampledToken], hasher: BlockHasher) -> SequenceOutput:
        """Append sampled tokens up to one that ends the request; returns what was appended."""
        position, finish_reason = self.num_tokens, FinishReason.NONE
        for token in tokens:
            self.request.token_ids.append(token.token_id)
            if self.num_tokens % hasher.block_tokens == 0:
                hasher.extend(self.request.hashes, self.request.token_ids, self.submit.cache_salt)
            finish_reason = self._finish_reason(token.token_id)
            if finish_reason is not FinishReason.NONE:
                break
        emitted = tokens[: self.num_tokens - position]
        return SequenceOutput(
            key=self.key,
            position=position,
            token_ids=tuple([token.token_id for token in emitted]),
            logprobs=tuple([one.logprobs for one in emitted if one.logprobs is not None]),
            finish_reason=finish_reason,
        )

    def accept_drafts(self, num_right: int) -> None:
        """The step with its drafts has ended, and so many of them were right."""
        if not num_right:  # as many tokens come without drafts as were wrong
            self.drafts_from = self.num_tokens + self.num_drafts
        self.num_drafts = 0
        self.begins_at(self.num_computed + num_right)

    def shows_progress(self, now_ms: int, interval_ms: int) -> bool:
        """Whether to show now that it goes on: at most once in the interval."""
        due = now_ms - self.progress_shown_ms >= interval_ms
        if due:
            self.progress_shown_ms = now_ms
        return due

    def starts_from(self, num_cached: int) -> None:
        """Its prefill begins after so many tokens that are cached here, by itself or by a pull."""
        before = self.hit_before_pull
        self.hit_tokens = num_cached if before is None else min(before, num_cached)
        self.pulled_tokens = num_cached - self.hit_tokens
        self.begins_at(num_cached)

    def prefill_report(self, now_ms: int) -> PrefillReport:
        """What its prefill, just completed, found in the cache here, and where its time went."""
        found = self.hit_tokens + self.pulled_tokens
        known_end = found if self.scored_end else self.known_end  # it did not want to find more
        return PrefillReport(
            self.key,
            num_prompt_tokens=self.num_prompt_tokens,
            hit_tokens=self.hit_tokens,
            computed_tokens=self.num_prompt_tokens - found,
            pulled_tokens=self.pulled_tokens,
            uncached_common_tokens=max(0, known_end - found),
            times=PrefillTimes(
                queue_ms=self.turn_ms - self.arrived_ms + self.computed_from_ms - self.ready_ms,
                transfer_ms=self.ready_ms - self.turn_ms,
                compute_ms=now_ms - self.computed_from_ms,
            ),
        )

    def _finish_reason(self, token_id: int) -> FinishReason:
        if token_id in self.submit.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.num_tokens_max:
            return FinishReason.LENGTH
        return FinishReason.NONE
