"""Compiles grammars for the tokens of one checkpoint.

The library holds the interpreter while it reads a vocabulary, about a second for 128,000 tokens. So
that happens at the start and not under other requests. It lets others go on while it compiles and
while it computes masks.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from disagg.errors import RequestError

COMPILED_MAX = 16
"""Grammars that are kept compiled; of more, those that were used last."""
LEXER_STATES_MAX = 50_000
"""Of one grammar, made as answers walk through them: 1 to 2 kB each. Hundreds are usual."""
SYMBOLS_MAX = 100_000
MULTIPLES_MAX = 100_000
"""Of the least common multiple and of the sum of all ``multipleOf`` of a grammar. The library has a
state for each remainder, which none of its limits counts: a million take seconds and 300 MB, seven
million minutes and gigabytes."""
MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)', re.ASCII)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
TEXTS_IN_TEXTS = 2
"""A schema has texts in JSON; so has a grammar that is one itself, with a schema in it."""
BLANKS = {"n": "\n", "r": "\r", "t": "\t"}
DIGITS_MAX = 15
"""Of those numbers, before the point and behind it."""
END = "<|end of answer|>"
"""A token of ours behind those of the checkpoint: its bit says whether the answer may end."""

Matcher = LLMatcher
"""Where one answer stands in its grammar."""


class GrammarCompiler:
    """Grammars over one checkpoint's tokens. May be used from several threads.

    Attributes:
        refusal: why no grammar can be used with this checkpoint; "" where they can.
        end_id: the token that stands for the end of an answer; the checkpoint's are below it.
    """

    def __init__(self, model_dir: str | Path) -> None:
        """Read the vocabulary; a checkpoint without one is no error, but a `refusal`."""
        self.refusal = ""
        self.end_id = 0
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(
            max_lexer_states=LEXER_STATES_MAX, max_grammar_size=SYMBOLS_MAX, verbose_errors=False
        )
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        self._executor: LLExecutor | None = None
        file = Path(model_dir) / "tokenizer.json"
        if not file.is_file():
            self.refusal = "the checkpoint has no tokenizer.json, so no grammar can be used"
            return
        try:
            self._tokenizer, self.end_id = _read_tokens(file)
        except (KeyError, OSError, TypeError, ValueError) as error:
            self.refusal = f"no grammar can be used with the checkpoint's tokenizer: {error}"

    def check(self, grammar: str, param: str) -> None:
        """Raise RequestError, naming ``param``, where no answer can match a grammar."""
        if _multiples(grammar) > MULTIPLES_MAX:
            raise RequestError(
                "the least common multiple or the sum of all multipleOf, without their points, is "
                f"more than {MULTIPLES_MAX}",
                param=param,
            )
        state = self.start(grammar, param=param)
        state.compute_bitmask()
        if state.is_error():
            raise RequestError("no answer can match it", param=param)

    def knows(self, grammar: str) -> bool:
        """Whether a grammar is kept compiled."""
        return grammar in self._compiled

    def start(self, grammar: str, *, param: str = "grammar", anew: bool = False) -> Matcher:
        """The state before the first token of an answer.

        Args:
            grammar: as in ``SamplingParams.grammar``.
            param: what an error names.
            anew: do not use what is kept, and keep what is compiled now.

        Raises:
            RequestError: no answer can be made to match it; the message says why.
        """
        if self._tokenizer is None:
            raise RequestError(self.refusal, param=param)
        with self._lock:
            compiled = None if anew else self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if compiled.is_error():
                reason = compiled.get_error().partition("\n<")[0].strip()
                raise RequestError(f"no grammar can be made of it: {reason}", param=param)
            with self._lock:
                self._compiled[grammar] = compiled
                self._compiled.move_to_end(grammar)
                while len(self._compiled) > COMPILED_MAX:
                    self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def masks(self, states: Sequence[Matcher], num_bits: int) -> NDArray[np.int32]:
        """Which tokens may come next: [states, words], a bit per token from the lowest on.

        Args:
            states: not failed; one may fail here, see ``is_error``.
            num_bits: at least so many; those behind `end_id` are 0.
        """
        if self._executor is None:
            self._executor = LLExecutor()
        own, wanted = (-(-bits // 32) for bits in (self.end_id + 1, num_bits))
        words = np.zeros((len(states), own), np.int32)
        places = [(state, row) for row, state in enumerate(states)]
        fill_next_token_bitmask_par(self._executor, places, words)
        return np.pad(words, ((0, 0), (0, max(0, wanted - own))))


def _multiples(grammar: str) -> float:
    """See `MULTIPLES_MAX`."""
    for _ in range(TEXTS_IN_TEXTS):  # more often does no harm: there is no escape in a key any more
        grammar = ESCAPE.sub(_unescaped, grammar)
    try:
        numbers = [Decimal(one).copy_abs() for one in MULTIPLE.findall(grammar)]
    except InvalidOperation:  # of an exponent with 18 digits
        return math.inf
    numbers = [number for number in numbers if number]  # the library refuses 0, where it counts
    if any(abs(number.adjusted()) > DIGITS_MAX for number in numbers):
        return math.inf
    found = [number.normalize() for number in numbers]
    own = [number.as_integer_ratio() for number in found]
    scale = math.lcm(*(10 ** max(0, -int(number.as_tuple().exponent)) for number in found))
    return max(
        math.lcm(*(numerator * scale // denominator for numerator, denominator in own)),
        sum(int(number.scaleb(max(0, -int(number.as_tuple().exponent)))) for number in found),
    )


def _unescaped(escape: re.Match[str]) -> str:
    code, char = escape.groups()
    return chr(int(code, 16)) if code else BLANKS.get(char, char)


def _read_tokens(file: Path) -> tuple[LLTokenizer, int]:
    """The vocabulary with the token `END` behind it, and the id of that."""
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    end_id = 1 + max(max(ids), *(token["id"] for token in added), 0)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"] = [*added, {"id": end_id, "content": END, **flags, "special": True}]
    return LLTokenizer(json.dumps(data), eos_token=end_id), end_id
