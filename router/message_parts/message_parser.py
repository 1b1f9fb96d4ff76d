"""An answer's text to the parts of its message, by the formats of its model."""

from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.parts import Content, Part, merged
from disagg.router.message_parts.thinking import ThinkingParser


class MessageParser:
    """Reasoning is taken out first; calls are found in what is left."""

    def __init__(self, thinking: ThinkingParser | None, calls: CallParser | None) -> None:
        self._thinking = thinking
        self._calls = calls

    def push(self, text: str) -> list[Part]:
        """Read more of the answer and return what is certain now."""
        return self._rest(self._thinking.push(text) if self._thinking else [Content(text)])

    def finish(self) -> list[Part]:
        """Return what was held back, once no more text comes."""
        parts = self._rest(self._thinking.finish()) if self._thinking else []
        return merged(parts + (self._calls.finish() if self._calls else []))

    def _rest(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._calls.push(part.text) if isinstance(part, Content) else [part]
        return found
