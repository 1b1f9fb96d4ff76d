"""How the next token of a request is chosen, and what is reported about it."""

from dataclasses import field

from disagg.messages.frozen import dataclass

TOP_LOGPROBS_MAX = 20
STOP_TOKENS_MAX = 128
"""Ids of one request; those of its checkpoint come on top."""
GRAMMAR_BYTES_MAX = 32 << 10
"""Of a grammar's text: a thousand properties of a JSON schema, compiled in a tenth of a second."""


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
    min_p: float = 0.0
    """Least probability that is kept, as a share of the best token's."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """(token id, what is added to its logit), by token id."""
    num_prompt_tokens: int = 0
    """So many of a sequence's tokens are its prompt, those after them were generated: what
    penalties, grammar, ``min_tokens`` and ``num_prompt_logprobs`` tell apart, also after a move,
    when generated tokens are computed as a prompt is."""
    grammar: str = field(default="", repr=False)
    """What the generated tokens must match, in llguidance's JSON form; "": anything. A stop token
    comes where they are complete and only there, and nothing else when they cannot go on."""
    eos_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Those of ``stop_token_ids`` that end an answer with a grammar; (): all. The others may occur
    in it."""
    min_tokens: int = 0
    """None of ``stop_token_ids`` is sampled before so many generated tokens."""
    num_prompt_logprobs: int | None = None
    """As ``num_logprobs``, of the prompt's own tokens from the second on, by whoever computes the
    prompt."""

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on how often tokens stand before it."""
        neutral = (0.0, 0.0, 1.0)
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != neutral

    @property
    def looks_back(self) -> bool:
        """Whether the next token depends on those before it in another way than by its logits."""
        return self.has_penalties or bool(self.grammar)

    @property
    def tells_prompt_apart(self) -> bool:
        """Whether ``num_prompt_tokens`` matters."""
        return self.looks_back or self.min_tokens > 0 or self.num_prompt_logprobs is not None

    def holds_back_stops(self, position: int) -> bool:
        """Whether the token at an absolute position may not be one that ends the request."""
        return position - self.num_prompt_tokens < self.min_tokens and bool(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the unmodified distribution) at one position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """(token id, logprob), best first."""
    rank: int = 0
    """Of a prompt's token among all tokens, the best 1; 0 where it was not counted."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token and, where requested, its log-probabilities."""

    token_id: int = field(repr=False)
    logprobs: TokenLogprobs | None = None
    error: str = ""
    """Why no token can follow, by the request's own grammar: that request fails, its neighbours go
    on. The token then only fills the place."""
