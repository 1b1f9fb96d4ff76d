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
from disagg.workers.engines.best_tokens import best_token, best_tokens
from disagg.workers.engines.draw import draw, some_rows
from disagg.workers.engines.grammar_states import NO_MASKS, GrammarMasks, GrammarStates, forbid
from disagg.workers.engines.penalties import adjust
from disagg.workers.engines.token_history import TokenCounts, TokenHistories

GREEDY_BELOW = 1e-5
"""Colder than this is greedy, as in vLLM: the quotient would leave float32."""


class NonFiniteError(ArithmeticError):
    """The model computed NaN or infinity: it read KV that nobody wrote, or its weights are bad."""


def check_finite(what: str, values: torch.Tensor) -> None:
    """Look at all values, whatever their type.

    Raises:
        NonFiniteError: one is NaN or infinite; ``what`` names it.
    """
    # The sum is several times faster; finite numbers may overflow in it, so it only acquits.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise NonFiniteError(f"{what} is not finite")


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
    logprobs = _logprobs(logits, tokens, params)
    return [
        SampledToken(token, logprobs.get(row), masks.errors.get(row, ""))
        for row, token in enumerate(chosen)
    ]


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that ask for them, by row; all in one call."""
    rows = [row for row, param in enumerate(params) if param.num_logprobs is not None]
    if not rows:
        return {}
    num_best = [min(params[row].num_logprobs or 0, logits.shape[-1]) for row in rows]
    asked = logits.index_select(0, torch.tensor(rows, device=logits.device))
    own = asked.gather(-1, tokens[rows, None])
    best, ids = best_tokens(asked, max(1, *num_best))
    highest = best[:, :1]
    norm = asked.sub_(highest).exp_().sum(-1, keepdim=True).log_().add_(highest)
    own_values, best_values, best_ids = (own - norm).tolist(), (best - norm).tolist(), ids.tolist()
    return {
        row: TokenLogprobs(
            own_values[i][0], tuple(zip(best_ids[i][:n], best_values[i][:n], strict=True))
        )
        for i, (row, n) in enumerate(zip(rows, num_best, strict=True))
    }
