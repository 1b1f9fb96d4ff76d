"""What steps and links take, and a worker as far as times go."""

from math import ceil, exp

from disagg.messages.frozen import dataclass
from disagg.messages.lazy import cached_property
from disagg.messages.step_times import SCALE_TOKENS, StepShape
from disagg.routing.estimates.answers import Answer, Steps, num_made_late

PROMPT_SHARE_MAX = 0.9
"""A worker that does nothing but prompts still gives its decodes a part of each step."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a worker's step takes, in ms: a constant, and a part of each thing it computes."""

    step_ms: float
    token_ms: float
    """Per token of a prompt."""
    context_token_ms: float
    """Per token of a prompt and `SCALE_TOKENS` before it."""
    decode_ms: float
    """Per sequence that is given its next token."""
    decode_context_ms: float
    """Per `SCALE_TOKENS` of tokens before those."""

    def shape_ms(self, shape: StepShape) -> float:
        """A step of any shape."""
        costs = (
            self.step_ms,
            self.token_ms,
            self.context_token_ms,
            self.decode_ms,
            self.decode_context_ms,
        )
        return sum(cost * num for cost, num in zip(costs, shape.features, strict=True))

    def decode_step_ms(self, num_decodes: float, context: float) -> float:
        """A step of decodes alone, with so many `SCALE_TOKENS` before them all together."""
        return self.step_ms + num_decodes * self.decode_ms + context * self.decode_context_ms

    def prompt_ms(self, num_tokens: float, num_before: float = 0) -> float:
        """What tokens of one prompt add to the steps that they are in.

        Args:
            num_tokens: to be computed.
            num_before: of the prompt, in the cache by then.
        """
        context = num_tokens * (num_before + num_tokens / 2) / SCALE_TOKENS
        return num_tokens * self.token_ms + context * self.context_token_ms


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a READ between two workers takes."""

    read_ms: float
    """Whatever it moves."""
    mib_ms: float

    def ms(self, num_bytes: float) -> float:
        """Of so many bytes; nothing for none."""
        return self.read_ms + num_bytes / (1 << 20) * self.mib_ms if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Prompts that will come to a worker, and for which its answers stand still."""

    share: float = 0.0
    """Of its time that they take, as they lately did."""
    each_ms: float = 0.0
    """That one of them takes; 0: none is known."""
    waiting_chance: float = 0.0
    """That a long one is among those that wait at the router to go there."""
    waiting_ms: float = 0.0
    """That those take together."""

    def chance(self, ms: float) -> float:
        """That one comes within so long."""
        none = exp(-self.share * ms / self.each_ms) if self.each_ms else 1.0
        return 1 - (1 - self.waiting_chance) * none

    @property
    def stall_ms(self) -> float:
        """For which an answer stands still if one comes; for more if more of them wait."""
        return max(self.each_ms, self.waiting_ms)


NO_LONG_PROMPTS = LongPrompts()


@dataclass(frozen=True, slots=False)
class Place:
    """A worker as far as times go: how fast it is and what it has to do already.

    Several plans ask the same of it, which is found out once.
    """

    cost: StepCost
    num_running: int
    """Sequences that decode there."""
    context_tokens: float
    """Tokens before each of those, on average."""
    num_queued_tokens: int
    """Of prompts that are there already."""
    num_queued: int
    """Prompts that have those."""
    num_requests: int
    """All that are there, running, waiting, being pulled or on their way."""
    sequences_max: int
    """It runs no more at once; 0: not known."""
    step_tokens_max: int
    """Of prompts, in a step; 0: not known."""
    num_coming: int = 0
    """Sequences that will decode there, but wait for their prompts."""
    prompt_share: float = 0.0
    """So much of its time will go to prompts, as it lately did; decodes wait meanwhile."""
    answers: tuple[Answer, ...] = ()
    """Of those that decode or will: this router's, as far as they are looked at one by one."""
    long_prompts: LongPrompts = NO_LONG_PROMPTS
    """Those among the prompts that will come, in `prompt_share` as well."""
    num_blocks_used: int = 0
    """Of its pool, those of leases among them; not those that are only cached."""
    num_blocks_free: int = 0
    num_holding: int = 0
    """Requests and leases that have the used ones."""
    num_waiting: int = 0
    """Requests that have nothing yet."""

    @cached_property
    def step_ms(self) -> float:
        """A decode step as it is now."""
        context = self.num_running * self.context_tokens
        return self.cost.decode_step_ms(self.num_running, context / SCALE_TOKENS)

    def joined_ms(self, num_tokens: float) -> float:
        """A decode step with one sequence more, of so many tokens."""
        context = self.num_running * self.context_tokens + num_tokens
        return self.cost.decode_step_ms(self.num_running + 1, context / SCALE_TOKENS)

    def prefill_ms(self, num_tokens: float, num_before: float = 0) -> float:
        """Until tokens of a prompt are computed, beside what decodes there."""
        if num_tokens <= 0:
            return 0.0
        prompt_ms = self.cost.prompt_ms(num_tokens, num_before)
        return self.num_steps(num_tokens) * self.step_ms + prompt_ms

    def num_steps(self, num_tokens: float) -> int:
        """In which tokens of a prompt are computed, if nothing else of prompts is there."""
        return ceil(num_tokens / self.step_tokens_max) if self.step_tokens_max else 1

    @cached_property
    def left_share(self) -> float:
        """Of its time beside the prompts that come as they lately did; never nothing."""
        return 1 - min(self.prompt_share, PROMPT_SHARE_MAX)

    @cached_property
    def calm_share(self) -> float:
        """The same if no long prompt comes."""
        short_share = max(0.0, self.prompt_share - self.long_prompts.share)
        return 1 - min(short_share, PROMPT_SHARE_MAX)

    def num_made_late(
        self,
        num_more: int,
        more_tokens: float,
        held_ms: float,
        slo_tpot_ms: float,
        mean_tokens: float,
    ) -> float:
        """Of those that decode there, now or after their prompts, who is late by a plan.

        Args:
            num_more: sequences that join them.
            more_tokens: of those, all together.
            held_ms: for which a prompt is computed in between.
            slo_tpot_ms: bound of those that have no own one; 0: none.
            mean_tokens: of an answer of which nothing else is known, as it is another router's.
        """
        if not slo_tpot_ms and not self.answers:
            return 0.0
        num = self.num_running + self.num_coming
        context = num * self.context_tokens
        queued_ms = self.queued_ms(self.num_queued_tokens)
        before = self.cost.decode_step_ms(num, context / SCALE_TOKENS)
        after = self.cost.decode_step_ms(num + num_more, (context + more_tokens) / SCALE_TOKENS)
        num_others = max(0, num - len(self.answers))
        return num_made_late(
            (*self.answers, Answer(0, mean_tokens, 0.0, num_alike=num_others)),
            slo_tpot_ms,
            Steps(before, queued_ms),
            Steps(after, queued_ms + held_ms, held_ms, self.drain_ms + held_ms),
        )

    @cached_property
    def queued_each(self) -> float:
        """Tokens of a queued prompt, on average."""
        return self.num_queued_tokens / max(1, self.num_queued)

    def tokens_before(self, num_tokens: float) -> float:
        """Queued tokens that are computed until a new prompt of so many is.

        Steps are shared: half of one is the oldest prompt's, in the other half the rest take turns.
        So a short prompt overtakes a long one, and a long one waits for all that is there. The step
        that runs is half over.
        """
        half = self.step_tokens_max / 2
        if not half:
            return self.num_queued_tokens
        share = max(num_tokens, half)
        others = max(0, self.num_queued - 1) * min(self.queued_each, share)
        return min(self.num_queued_tokens, half + 2 * others + share)

    def queue_ms(self, num_tokens: float) -> float:
        """What a new prompt of so many tokens waits: for the running step, and by its neighbours'.

        Args:
            num_tokens: to be computed of it.
        """
        if not self.num_queued_tokens:
            return self.step_ms / 2 if self.num_running else 0.0
        before = self.tokens_before(num_tokens)
        num_steps = max(1.0, before / self.step_tokens_max) if self.step_tokens_max else 1.0
        return self.queued_ms(before) + num_steps * self.step_ms

    @cached_property
    def drain_ms(self) -> float:
        """Until everything is computed that is queued."""
        num_steps = self.num_queued_tokens / (self.step_tokens_max or self.num_queued_tokens or 1)
        return self.queued_ms(self.num_queued_tokens) + num_steps * self.step_ms

    def queued_ms(self, num_tokens: float) -> float:
        """What so many of the queued tokens add to the steps that they are in."""
        each = self.queued_each
        return num_tokens / each * self.cost.prompt_ms(each) if each else 0.0

    def computed_in(self, ms: float) -> float:
        """How many of the queued tokens are computed in so much time."""
        all_ms = self.queued_ms(self.num_queued_tokens)
        return self.num_queued_tokens * (min(1.0, ms / all_ms) if all_ms else 1.0)

    def beside_ms(self, num_computed: float, num_steps: float) -> float:
        """By how much so many decode steps are longer for the prompts queued there.

        Args:
            num_computed: of the queued tokens, before those steps.
            num_steps: in each of which at most `step_tokens_max` of them are.
        """
        left = max(0.0, self.num_queued_tokens - num_computed)
        if self.step_tokens_max:
            left = min(left, num_steps * self.step_tokens_max)
        return self.queued_ms(left)

    def held_up(self, num_tokens: float) -> float:
        """Requests there that a prompt of so many tokens holds up, each by all of its time.

        Those that decode; of those that come the more, the longer it takes; of the queued prompts
        each by no more than its own tokens, as they share the steps.
        """
        coming = num_tokens / max(1.0, num_tokens + self.num_queued_tokens)
        queued = min(1.0, self.queued_each / max(1.0, num_tokens))
        return self.num_running + self.num_coming * coming + self.num_queued * queued

    def num_blocks_missing(self, num_blocks: float) -> float:
        """Blocks that have to be given back first, if a new request takes so many.

        Memory goes by arrival, so those that wait come before it, each with as many as others have.
        """
        if not self.num_blocks_used:
            return 0.0
        each = self.num_blocks_used / max(1, self.num_holding)
        return max(0.0, num_blocks + self.num_waiting * each - self.num_blocks_free)

    def memory_ms(self, num_blocks: float, mean_tokens: float) -> float:
        """Until a new request has so many blocks, if answers that end give them back.

        Args:
            num_blocks: that it takes.
            mean_tokens: of an answer.
        """
        missing = self.num_blocks_missing(num_blocks)
        if not missing:
            return 0.0
        return missing / self.num_blocks_used * mean_tokens * self.step_ms / self.left_share

    def slot_ms(self, num_answer_tokens: int) -> float:
        """Until one of the places is free in which sequences run, if answers are as long as this.

        By turns one of them ends; nothing where there is a free one.
        """
        num_missing = self.num_requests + 1 - self.sequences_max if self.sequences_max else 0
        if num_missing <= 0:
            return 0.0
        return num_missing * num_answer_tokens * self.step_ms / self.sequences_max
