"""Where every answer with a grammar stands in it, and what may come next in each row."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from disagg.errors import RequestError
from disagg.grammar.compiler import GrammarCompiler, Matcher
from disagg.messages.sampling import SamplingParams
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.sequence_memory import SequenceMemory


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """What may come next in the rows that have a grammar.

    Attributes:
        rows: of the batch.
        bits: [rows, bytes], a bit per token from the lowest on; at least one is set in each.
        errors: by row, why nothing can follow there; not among ``rows``.
    """

    rows: list[int] = field(default_factory=list)
    bits: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0), np.uint8), repr=False)
    errors: dict[int, str] = field(default_factory=dict)


NO_MASKS = GrammarMasks()
ADDED = torch.tensor(
    [[0.0 if byte >> place & 1 else -torch.inf for place in range(8)] for byte in range(256)]
)
"""To the logits of a byte's eight tokens: rows of a table are faster than shifts."""


class GrammarStates(SequenceMemory["_Answer"]):
    """The state of each answer: a function of its grammar and of the tokens generated so far.

    So an answer that goes on elsewhere, or begins anew here, replays its tokens and is where it
    was. A slice may be computed again: what was sampled beyond it is taken back.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        super().__init__()
        self._compiler = compiler

    def needed(self, sampling: SamplingParams) -> bool:
        """Whether the answer must match a grammar."""
        return bool(sampling.grammar)

    def begin(self, token_ids: Sequence[int], sampling: SamplingParams) -> "_Answer":
        """Replay what a sequence has generated."""
        return _Answer(self._compiler, token_ids, sampling)

    def masks(self, parts: Sequence[SequenceSlice], vocab_size: int) -> GrammarMasks:
        """What may come next in a batch.

        Args:
            parts: the slices that sample, in the order of the rows.
            vocab_size: of the model; nothing beyond it is allowed.
        """
        asked: list[tuple[int, _Answer]] = []
        for row, part in enumerate(parts):
            answer = self.of(part)
            if answer is not None:
                answer.keep(part.start + len(part.token_ids))
                asked.append((row, answer))
        if not asked:
            return NO_MASKS
        rows: list[int] = []
        found: list[NDArray[np.uint8]] = []
        going = [(row, answer) for row, answer in asked if not answer.error and not answer.ended]
        if going:
            assert self._compiler is not None  # without one they all have an error
            words = self._compiler.masks([answer.matcher for _, answer in going], vocab_size)
            for (row, answer), own in zip(going, words, strict=True):
                bits = answer.allowed(own, vocab_size)
                if not answer.error:
                    rows.append(row)
                    found.append(bits)
        errors = {row: answer.error for row, answer in asked if answer.error}
        return GrammarMasks(rows, np.stack(found) if found else NO_MASKS.bits, errors)


class _Answer:
    """One answer: its tokens, and where the grammar stands after them."""

    matcher: Matcher

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        token_ids: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        self._compiler = compiler
        self._grammar = sampling.grammar
        self._stop_token_ids = sampling.stop_token_ids
        self._end_ids = sampling.eos_token_ids or sampling.stop_token_ids
        self._num_prompt_tokens = min(sampling.num_prompt_tokens, len(token_ids))
        self._tokens = list(token_ids[self._num_prompt_tokens :])
        self.ended = False
        """A stop token has come: steps that were launched before it was known may still sample."""
        self.error = ""
        """Why nothing can follow."""
        self._replay()

    def append(self, token_id: int) -> None:
        """Go on by the token that was sampled."""
        self._tokens.append(token_id)
        self._consume(token_id)

    def keep(self, num_tokens: int) -> None:
        """Of prompt and answer only so many tokens count; what was sampled beyond is taken back.

        Raises:
            ValueError: fewer are known.
        """
        num_generated = num_tokens - self._num_prompt_tokens
        if not 0 <= num_generated <= len(self._tokens):
            raise ValueError(f"{len(self._tokens)} generated tokens known, not {num_generated}")
        if num_generated < len(self._tokens):
            del self._tokens[num_generated:]
            self._replay()

    def allowed(self, words: NDArray[np.int32], vocab_size: int) -> NDArray[np.uint8]:
        """The bits of the tokens that may come next; sets ``error`` where there are none.

        Args:
            words: what the matcher allows, `END` among it; changed in place.
            vocab_size: of the model.
        """
        assert self._compiler is not None
        if self.matcher.is_error():
            # Perhaps a bound of what other answers have left in the compiled grammar.
            self._replay(anew=True)
            if not self.error:
                (words,) = self._compiler.masks([self.matcher], vocab_size)
                if self.matcher.is_error():
                    self.error = "the grammar is too complex, or no answer can match it"
        bits = words.view(np.uint8)
        byte, place = divmod(self._compiler.end_id, 8)
        may_end = bool(bits[byte] >> place & 1)
        byte, place = divmod(min(self._compiler.end_id, vocab_size), 8)
        bits[byte] &= (1 << place) - 1
        bits[byte + 1 :] = 0
        for token_id in self._end_ids:
            if token_id < vocab_size:
                byte, place = divmod(token_id, 8)
                bits[byte] = int(bits[byte]) & ~(1 << place) | may_end << place
        if not self.error and not bits.any():
            self.error = "by its grammar the answer is complete, but no stop token may end it"
        return bits

    def _replay(self, *, anew: bool = False) -> None:
        self.ended, self.error = False, ""
        try:
            if self._compiler is None:
                raise RequestError("this worker was started without grammars")
            self.matcher = self._compiler.start(self._grammar, anew=anew)
        except RequestError as error:
            self.error = error.message
            return
        for token_id in self._tokens:
            self._consume(token_id)

    def _consume(self, token_id: int) -> None:
        if self.ended or self.error:
            return
        if token_id in self._stop_token_ids:
            self.ended = True
        elif not self.matcher.consume_token(token_id):
            self.error = "the answer so far does not match its grammar"


def forbid(logits: torch.Tensor, masks: GrammarMasks) -> torch.Tensor:
    """A copy of logits [rows, vocab_size] with minus infinity for what may not come."""
    device, vocab_size = logits.device, logits.shape[-1]
    own = np.ascontiguousarray(masks.bits[:, : -(-vocab_size // 8)])
    bits = torch.from_numpy(own).to(device).flatten().int()
    added = ADDED.to(device).index_select(0, bits).view(len(own), -1)[:, :vocab_size].contiguous()
    if len(own) == len(logits):
        return added.add_(logits)
    rows = torch.tensor(masks.rows, device=device)
    return logits.index_copy(0, rows, added.add_(logits.index_select(0, rows)))
