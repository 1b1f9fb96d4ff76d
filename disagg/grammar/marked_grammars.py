"""Grammars of answers in which text, a model's own marks and JSON follow each other."""

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from disagg.grammar.json_grammars import FORM


class MarkedGrammar:
    """Writes one grammar; the methods return expressions to be joined by blanks or ``|``."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        """``token_id`` says which token a mark is, if it is one at all."""
        self._token_id = token_id
        self._rules: list[str] = []

    def mark(self, text: str) -> str:
        """A mark of the model: one token where the vocabulary has it, as models write it."""
        token_id = self._token_id(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def text(self, text: str) -> str:
        """Exactly this text."""
        return json.dumps(text, ensure_ascii=False)

    def line_breaks(self, num_max: int) -> str:
        """So many line breaks or fewer."""
        return self._rule("BREAKS", f": /\\n{{0,{num_max}}}/", terminal=True)

    def any_text_and(self, mark: str) -> str:
        """Any text, and the mark that ends it."""
        if self._token_id(mark) is None:
            return self._rule(
                "text", f"[suffix={json.dumps(mark, ensure_ascii=False)}]: /(.|\\n)*/"
            )
        text = self._rule("TEXT", ": /(.|\\n)*/", terminal=True)
        return f"{text} {self.mark(mark)}"

    def json(self, schema: dict[str, Any]) -> str:
        """An instance of a schema."""
        text = json.dumps(schema | {"x-guidance": FORM}, ensure_ascii=False, separators=(",", ":"))
        return self._rule("json", f": %json {text}")

    def grammar(self, expression: str) -> str:
        """The grammar of answers that match an expression, see ``SamplingParams.grammar``."""
        return LLMatcher.grammar_from_lark("\n".join([f"start: {expression}", *self._rules]))

    def _rule(self, name: str, definition: str, *, terminal: bool = False) -> str:
        numbered = f"{name}{'_' if terminal else ''}{len(self._rules)}"
        self._rules.append(numbered + definition)
        return numbered
