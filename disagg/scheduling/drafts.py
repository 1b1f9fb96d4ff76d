"""Speculative decoding by prompt lookup: what may follow is looked up in a sequence's own tokens.

A step computes such a draft behind the last token, and samples after each of its tokens. What is
drawn at a position is a function of logits, seed and position alone, so a draft is right if it
equals what is drawn in its place: the tokens are those of decoding without drafts, sampled ones
too. Nothing else decides about them.

Nothing is drafted where the next token depends on the tokens before it in another way too, by a
penalty or a grammar, nor where only one is wanted, before a hand-over; and nobody drafts in a step
with a chunk of a prompt, which fills it anyhow.
"""

from dataclasses import replace

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.sampling import SampledToken
from disagg.messages.submit import Role
from disagg.scheduling.ngrams import NgramIndex
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.step import SequenceSlice


def draft_of(seq: Sequence, kv: KVCacheCoordinator, room: int) -> tuple[int, ...]:
    """What is computed behind the token that a sequence has just got a slot for.

    Nothing for which there is no slot, nothing past its length, and at most ``room`` tokens.
    """
    if seq.num_scheduled != seq.num_tokens - 1:
        return ()  # its token is not known yet
    return _draft(seq, min(room, kv.slots.num_for_drafts(seq.key), _num_acceptable(seq)))


def waits_to_draft(seq: Sequence) -> bool:
    """Whether a sequence whose next token is in flight is in no step before that is known.

    It is so where its tokens so far say already what may follow. Others go on with a placeholder.
    """
    in_flight = seq.num_scheduled == seq.num_tokens
    return in_flight and bool(_draft(seq, min(1, _num_acceptable(seq) - 1)))


def rows_of(part: SequenceSlice) -> list[SequenceSlice]:
    """Of a slice that samples, one for each row that is sampled: it ends with that row's token."""
    if not part.num_drafts:
        return [part]
    num_tokens = len(part.token_ids)
    ends = range(num_tokens - part.num_drafts, num_tokens + 1)
    return [replace(part, token_ids=part.token_ids[:end], num_drafts=0) for end in ends]


def accepted(
    part: SequenceSlice, first: SampledToken, after_drafts: tuple[SampledToken, ...]
) -> tuple[SampledToken, ...]:
    """The sampled tokens that follow right ones: the first, and one after each right draft."""
    samples = (first, *after_drafts)
    drafts = part.token_ids[len(part.token_ids) - part.num_drafts :]
    for number, draft in enumerate(drafts):
        if draft != samples[number].token_id:
            return samples[: number + 1]
    return samples


def _num_acceptable(seq: Sequence) -> int:
    """Drafts that could all be accepted: one token more is sampled behind them."""
    return seq.num_tokens_max - seq.num_tokens - 1


def _draft(seq: Sequence, num_tokens: int) -> tuple[int, ...]:
    if (
        num_tokens < 1
        or seq.num_tokens < seq.drafts_from
        or seq.role is Role.PREFILL
        or seq.submit.sampling.looks_back
    ):
        return ()
    if seq.ngrams is None:
        seq.ngrams = NgramIndex()
    return seq.ngrams.draft(seq.request.token_ids, num_tokens)
