"""Choose the next tokens from logits; randomness is a function of seed and position alone.

Every engine samples here, so that a request draws the same tokens wherever it runs. The batch is
handled as a whole, on the logits' device.
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from disagg.grammar.compiler import GrammarCompiler
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams, TokenLogprobs
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.best_tokens import best_token
from disagg.workers.engines.draw import draw, some_rows
from disagg.workers.engines.finite import check_finite
from disagg.workers.engines.grammar_states import NO_MASKS, GrammarMasks, GrammarStates, forbid
from disagg.workers.engines.logprobs import token_logprobs
from disagg.workers.engines.penalties import adjust, hold_back_stops
from disagg.workers.engines.token_history import TokenCounts, TokenHistories

GREEDY_BELOW = 1e-5
"""Colder than this is greedy, as in vLLM: the quotient would leave float32."""


class Sampler:
    """Samples for one engine, and keeps what the next token of some sequences depends on.

    Args:
        grammars: of the engine's checkpoint; without them no answer with a grammar gets a token.

    Attributes:
        histories: the earlier tokens of sequences that ask for penalties.
        grammars: where the answers with a grammar stand.
    """

    def __init__(self, grammars: GrammarCompiler | None = None) -> None:
        self.histories = TokenHistories()
        self.grammars = GrammarStates(grammars)

    def apply(self, ended: Iterable[RequestKey], slices: Collection[SequenceSlice]) -> None:
        """Forget what a step ends, begin what it begins; before anything of it is sampled."""
        ended = tuple(ended)
        self.histories.apply(ended, slices)
        self.grammars.apply(ended, slices)

    def sample(self, logits: torch.Tensor, parts: Sequence[SequenceSlice]) -> list[SampledToken]:
        """Sample one token per slice.

        Args:
            logits: [rows, vocab_size], any float type.
            parts: the slices whose rows these are; each has ``sampling``.

        Raises:
            NonFiniteError: a logit is NaN or infinite; nothing may be emitted.
        """
        sampled = sample(
            logits,
            [part.sampling for part in parts if part.sampling is not None],
            [part.start + len(part.token_ids) for part in parts],
            [self.histories.before(part) for part in parts],
            self.grammars.masks(parts, logits.shape[-1]),
        )
        for part, token in zip(parts, sampled, strict=True):
            self.histories.add(part, token.token_id)
            self.grammars.add(part, token.token_id)
        return sampled


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seen: Sequence[TokenCounts | None] = (),
    masks: GrammarMasks = NO_MASKS,
) -> list[SampledToken]:
    """Sample one token per row; a row's outcome does not depend on the other rows.

    Args:
        logits: [rows, vocab_size], any float type.
        params: per row.
        positions: per row the absolute index, in its sequence, of the token being sampled.
        seen: per row the tokens before it, where it has penalties; nothing if no row has.
        masks: of the rows that have a grammar; where nothing can follow, the token has the error.

    Raises:
        NonFiniteError: a logit is NaN or infinite; nothing may be emitted.
    """
    logits = logits.float()
    check_finite("a logit", logits)
    adjusted = adjust(logits, params, seen)
    if masks.rows:
        adjusted = forbid(adjusted, masks)
    early = [row for row, at in enumerate(positions) if params[row].holds_back_stops(at)]
    if early:
        adjusted = hold_back_stops(adjusted, early, params)
    greedy = [row for row, param in enumerate(params) if param.temperature < GREEDY_BELOW]
    drawn = [row for row, param in enumerate(params) if param.temperature >= GREEDY_BELOW]
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if greedy:
        tokens[greedy] = best_token(some_rows(adjusted, greedy))
    if drawn:
        tokens[drawn] = draw(
            some_rows(adjusted, drawn),
            [params[row] for row in drawn],
            [positions[row] for row in drawn],
        )
    chosen: list[int] = tokens.tolist()
    asked = [row for row, param in enumerate(params) if param.num_logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if asked:
        own = logits.index_select(0, torch.tensor(asked, device=logits.device))
        num_best = [params[row].num_logprobs or 0 for row in asked]
        logprobs = dict(zip(asked, token_logprobs(own, tokens[asked], num_best), strict=True))
    return [
        SampledToken(token, logprobs.get(row), masks.errors.get(row, ""))
        for row, token in enumerate(chosen)
    ]
