"""Reasoning between ``<think>`` and ``</think>``, as DeepSeek, Qwen and Nemotron-H write it."""

from disagg.router.message_parts.parts import Content, Reasoning
from disagg.router.message_parts.text_reader import EndOfText, Reading, TextReader, until

THINK, THINK_END = "<think>", "</think>"


class ThinkingParser(TextReader):
    """Text to reasoning, which comes first if at all, and content.

    Line breaks next to the tags belong to the tags. An answer that ends within is all reasoning.
    """

    def __init__(self, *, open_in_prompt: bool) -> None:
        """``open_in_prompt``: the prompt ends with the opening tag."""
        self._open = open_in_prompt
        self._breaks = ""
        self._drops_breaks = True
        super().__init__()

    def read(self) -> Reading[None]:
        """See `TextReader.read`."""
        try:
            if self._open or (yield from self._opens()):
                yield from self._thoughts()
                char = "\n"
                while char == "\n":
                    char = yield
                self.emit(Content(char))
            yield from until((), self._answers, self)
        except EndOfText:
            return

    def _opens(self) -> Reading[bool]:
        """Whether the tag is the first of the text; what is instead is content."""
        text = ""
        try:
            while THINK.startswith(text.lstrip()):
                text += yield
                if text.endswith(THINK):
                    return True
        except EndOfText:
            if text:
                self.emit(Content(text))
            raise
        self.emit(Content(text))
        return False

    def _thoughts(self) -> Reading[None]:
        try:
            yield from until((THINK_END,), self._thinks, self)
        except EndOfText:
            if self._breaks:
                self.emit(Reasoning(self._breaks))
            raise
        self._breaks = ""

    def _answers(self, text: str) -> None:
        self.keep()
        self.emit(Content(text))

    def _thinks(self, text: str) -> None:
        self.keep()
        shown = (self._breaks + text).rstrip("\n")
        if not shown:
            self._breaks += text
            return
        self._breaks = (self._breaks + text)[len(shown) :]
        if self._drops_breaks:
            self._drops_breaks, shown = False, shown.lstrip("\n")
        self.emit(Reasoning(shown))
