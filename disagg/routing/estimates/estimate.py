"""What a plan is expected to take, from plain numbers: a pure function."""

from math import isfinite

from disagg.messages.frozen import dataclass
from disagg.routing.estimates.place import LinkCost, Place
from disagg.routing.slo import missed

ANSWER_TOKENS = 64
"""Tokens of an answer over which plans are compared, fewer where a request may have no more."""
PUSHED_OUT_SHARE = 0.5
"""What is pushed out of a cache is asked for again so often, beside what is in one: what was found
least lately goes first."""


@dataclass(frozen=True, slots=True)
class Move:
    """KV that one worker reads from another, and the link between them."""

    num_bytes: int
    """All of it, by groups."""
    num_bytes_at_end: int
    """Of that what can be read only once the prompt is computed: windows and states."""
    link: LinkCost


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan has to do for a request."""

    num_tokens: int
    """Of its prompt."""
    num_found: int
    """Of those, not computed: cached, pulled or loaded."""
    num_answer_tokens: int
    """At most `ANSWER_TOKENS`."""
    load_ms: float = 0.0
    """Reads of tiers."""
    pull: Move | None = None
    """A prefix from a third worker, before anything is computed."""
    handover: Move | None = None
    """None: one worker does all."""
    reserve_ms: float = 0.0
    """The reservation at the decode worker, of a hand-over."""
    message_ms: float = 0.0
    """Submit, report and first token on their way."""
    commit_ms: float = 0.0
    """From the last READ of a hand-over to its commit."""
    spread_tokens: float = ANSWER_TOKENS
    """Of others' answers, over which what holds them up once is spread."""
    num_behind: int = 0
    """Requests that wait at the router, and wait on while this one waits at a worker."""
    num_held: int = 0
    """Of the tokens found, in the cache of the worker that computes the rest."""
    found_share: float = 0.0
    """Of prompts' tokens that came lately, what was in some cache."""
    newcomers_per_ms: float = 0.0
    """Requests to come that compute less than this one, each counting for more or less than 1 as
    its bound is tighter or wider."""
    others_free_ms: float = 0.0
    """Until the first of all other workers has computed all that is queued there."""
    pull_ms: float = 0.0
    """Of a pull besides its READ."""
    handed_tokens: float = 0.0
    """Tokens of such a prompt that take as much of the decode worker's cache as the hand-over."""
    slo_tpot_ms: float = 0.0
    """Bound for the time per token of all who have no own one; 0: none."""
    num_blocks: int = 0
    """That it takes where it is computed, besides what it finds there."""
    num_blocks_handed: int = 0
    """The same where it is decoded, of a hand-over."""
    block_bytes: int = 0
    """Of a block where it is computed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan takes and what it costs others, in ms; all of it finite and at least 0."""

    queue_ms: float
    room_ms: float
    """Of that, until there is memory for it and a place to run in."""
    drain_ms: float
    """Until all is computed that is queued where it is prefilled: so long it waits at most."""
    transfer_ms: float
    """Before anything is computed: a reservation, a prefix from another worker or from tiers."""
    prefill_ms: float
    prefill_alone_ms: float
    """The same, if nothing else was at the worker."""
    message_ms: float
    handover_ms: float
    """From the first token until the decode worker has everything; none where one does all."""
    tpot_ms: float
    """Of its own tokens afterwards."""
    others_ms: float
    """By which everybody else is held up, those to come among them, all added up."""
    num_made_late: float
    """Of the answers where its prompt is computed, and where it is decoded if that is another
    worker; likely ones count in part."""
    num_bytes: int
    """That are moved."""
    num_answer_tokens: int
    stall_share: float
    """How much its prompt is in the way of answers: all, 1, if it takes as long as all their tokens
    together, and less the shorter it is."""
    calm_tpot_ms: float
    """As `mean_tpot_ms`, if no long prompt comes to where it is decoded meanwhile."""
    stalled_tpot_ms: float
    """The same if one does."""
    stall_chance: float
    """That one does."""

    @property
    def ttft_ms(self) -> float:
        """From the plan to its first token at the router."""
        return self.queue_ms + self.transfer_ms + self.prefill_ms + self.message_ms

    @property
    def ttft_alone_ms(self) -> float:
        """The same, if nothing else was at the worker that computes the prompt."""
        return self.transfer_ms + self.prefill_alone_ms + self.message_ms

    @property
    def mean_tpot_ms(self) -> float:
        """Of its own tokens after the first, with what it waits for the second one."""
        return self.tpot_ms + self.handover_ms / max(1, self.num_answer_tokens)

    def tpot_missed(self, slo_tpot_ms: float) -> float:
        """How likely its own time per token is above a bound, 0 to 1.

        A long prompt in its way is one that comes or does not: their average hides that.
        """
        calm, stalled = (
            missed(ms / slo_tpot_ms) for ms in (self.calm_tpot_ms, self.stalled_tpot_ms)
        )
        return calm + self.stall_chance * (stalled - calm)

    @property
    def is_finite(self) -> bool:
        """Whether all figures are: what a worker tells of its steps may be as large as may be."""
        waits_ms = self.own_ms + self.drain_ms + self.others_ms
        return isfinite(waits_ms + self.num_made_late + self.calm_tpot_ms + self.stalled_tpot_ms)

    @property
    def own_ms(self) -> float:
        """Until its answer is there, as far as it is looked ahead."""
        return self.ttft_ms + self.num_answer_tokens * self.mean_tpot_ms

    def cost_ms(self, others_weight: float) -> float:
        """By what plans are compared: its own time, and that of others with a weight."""
        return self.own_ms + others_weight * self.others_ms


def estimate(work: Work, prefill: Place, decode: Place) -> Estimate:
    """Estimate a plan.

    Args:
        work: what is to be done.
        prefill: who computes the prompt.
        decode: who decodes; the same where one worker does all.
    """
    num_computed = max(1, work.num_tokens - work.num_found)
    num_before = work.num_tokens - num_computed
    local = work.handover is None
    slot_ms = decode.slot_ms(work.num_answer_tokens)
    queue_ms = prefill.queue_ms(num_computed)
    prefill_ms = prefill.prefill_ms(num_computed, num_before)
    pull_ms = 0.0
    if work.pull is not None:
        pull_ms = work.pull_ms + work.pull.link.ms(work.pull.num_bytes)
    held_ms = prefill.cost.prompt_ms(num_computed, num_before)
    token_ms = decode.joined_ms(work.num_tokens)
    num_answer = work.num_answer_tokens
    others_ms = prefill.held_up(num_computed) * held_ms
    others_ms += (decode.num_running + decode.num_coming) * num_answer * (token_ms - decode.step_ms)
    others_ms += work.num_behind * queue_ms
    others_ms += _pushed_out_ms(work, prefill, decode) + _newcomers_ms(work, prefill, prefill_ms)
    handover_ms = 0.0
    computed_meanwhile = prefill.tokens_before(num_computed)
    if work.handover is not None:
        handover_ms = _left_ms(work.handover, prefill_ms) + work.commit_ms
        computed_meanwhile = decode.computed_in(queue_ms + prefill_ms + handover_ms)
    pause_ms = held_ms / work.spread_tokens
    beside_ms = decode.beside_ms(computed_meanwhile, num_answer) / max(1, num_answer)
    calm_ms = token_ms / decode.calm_share
    later_ms = beside_ms + handover_ms / max(1, num_answer)
    bounds = work.slo_tpot_ms, work.spread_tokens
    if local:
        late = decode.num_made_late(1, work.num_tokens, held_ms, *bounds)
    else:
        late = prefill.num_made_late(0, 0, held_ms, *bounds)
        late += decode.num_made_late(1, work.num_tokens, 0.0, *bounds)
    room_ms = slot_ms + _memory_ms(work, prefill, decode)
    return Estimate(
        queue_ms=queue_ms + room_ms,
        room_ms=room_ms,
        drain_ms=room_ms + prefill.drain_ms,
        transfer_ms=work.load_ms + pull_ms + (0.0 if local else work.reserve_ms),
        prefill_ms=prefill_ms,
        prefill_alone_ms=prefill.num_steps(num_computed) * prefill.cost.step_ms + held_ms,
        message_ms=work.message_ms,
        handover_ms=handover_ms,
        tpot_ms=token_ms / decode.left_share + beside_ms,
        others_ms=others_ms,
        num_made_late=late,
        num_bytes=sum(move.num_bytes for move in (work.pull, work.handover) if move is not None),
        num_answer_tokens=num_answer,
        calm_tpot_ms=calm_ms + later_ms,
        stalled_tpot_ms=calm_ms + later_ms + decode.long_prompts.stall_ms / max(1, num_answer),
        stall_chance=decode.long_prompts.chance(num_answer * calm_ms),
        stall_share=_share_of(pause_ms, token_ms),
    )


def _share_of(pause_ms: float, token_ms: float) -> float:
    """At most 1, also of a token that takes no time."""
    return pause_ms / token_ms if pause_ms < token_ms else 1.0


def _left_ms(move: Move, prefill_ms: float) -> float:
    """What is still to be read when the prompt is computed: the rest is read meanwhile."""
    early = move.num_bytes - move.num_bytes_at_end
    hidden_ms = min(move.link.ms(early), prefill_ms)
    early_left = max(0.0, move.link.ms(early) - hidden_ms)
    return early_left + move.link.ms(move.num_bytes_at_end)


def _memory_ms(work: Work, prefill: Place, decode: Place) -> float:
    """Until there are blocks for it, where it is computed and where it is decoded.

    Where prompts are handed over what lies there waits to be read.
    """
    if work.handover is None:
        return decode.memory_ms(work.num_blocks, work.spread_tokens)
    missing = prefill.num_blocks_missing(work.num_blocks)
    read_ms = missing * work.block_bytes / (1 << 20) * work.handover.link.mib_ms
    return read_ms + decode.memory_ms(work.num_blocks_handed, work.spread_tokens)


def _pushed_out_ms(work: Work, prefill: Place, decode: Place) -> float:
    """What is computed again for what the plan's copies push out of caches, which are full.

    Who needs it waits for it, and so do all beside whom it is computed, as many as decode there
    now.
    """
    if not work.found_share:
        return 0.0
    each = PUSHED_OUT_SHARE * work.found_share / max(1, work.num_tokens)

    def again_ms(num_tokens: float, place: Place) -> float:
        return num_tokens * place.cost.prompt_ms(work.num_tokens) * (1 + place.num_running)

    kept_ms = again_ms(work.num_tokens - work.num_held, prefill)
    return each * (kept_ms + again_ms(work.handed_tokens, decode))


def _newcomers_ms(work: Work, prefill: Place, prefill_ms: float) -> float:
    """By how much shorter requests to come are held up: while no worker is free of prompts.

    A long prompt behind another long one leaves other workers free for them. Who comes waits for
    what is left then, all of them for half of the square; for as long once more, as they have half
    of each step beside a long prompt; and what they wait they pass on to those after them, the
    more of them the busier the worker is.
    """
    if not work.newcomers_per_ms:
        return 0.0
    before_ms = min(prefill.drain_ms, work.others_free_ms)
    after_ms = min(prefill.drain_ms + prefill_ms, work.others_free_ms)
    return (
        work.newcomers_per_ms * (after_ms - before_ms) * (after_ms + before_ms) / prefill.left_share
    )
