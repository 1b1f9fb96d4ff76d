"""How the next token of a request is chosen, and what is reported about it."""

from dataclasses import dataclass, field

TOP_LOGPROBS_MAX = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; validated by the router before it is built.

    Randomness is a function of ``(seed, position)`` alone, where position is the absolute index
    of the token in its sequence, so a request that moves to another worker goes on unchanged.
    """

    max_tokens: int
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """A sampled token among these ends the request with ``stop``; it is still reported."""
    num_logprobs: int | None = None
    """None: none; 0: the sampled token's; n: also those of the n best."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the unmodified distribution) at one position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token and, where requested, its log-probabilities."""

    token_id: int = field(repr=False)
    logprobs: TokenLogprobs | None = None
