"""gpt-oss's format: messages with channels and recipients.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``; a call is
a message ``to=functions.NAME``. OpenAI's own library for it downloads its vocabulary when it is
first used, and takes tokens of that vocabulary alone.
"""

import re
from collections.abc import Callable

from disagg.router.message_parts.call_parser import CallParser, Schemas
from disagg.router.message_parts.json_calls import read_arguments
from disagg.router.message_parts.parts import Content, Part, Reasoning
from disagg.router.message_parts.text_reader import (
    EndOfText,
    Malformed,
    Reading,
    after_blanks,
    until,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ENDS = (END, CALL, RETURN)
FUNCTIONS = "functions."
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")
HEADER_CHARS_MAX = 512


class _NoBlocks:
    """Messages are read by `HarmonyParser` itself."""

    marks: tuple[str, ...] = ()
    openings = ""

    def read_block(self, mark: str, calls: CallParser) -> Reading[None]:
        """Never called."""
        raise NotImplementedError


class HarmonyParser(CallParser):
    """Text to reasoning (the channel ``analysis``), content (all others) and calls.

    What is no message is content.
    """

    def __init__(self, schemas: Schemas, *, with_reasoning: bool = True) -> None:
        """Without ``with_reasoning`` that is content as well."""
        self._thought: Callable[[str], Part] = Reasoning if with_reasoning else Content
        super().__init__(_NoBlocks(), schemas)

    def read(self) -> Reading[None]:
        """See `TextReader.read`."""
        # The prompt ends with the beginning of the first header.
        marks: tuple[str, ...] = (START, CHANNEL, f" to={FUNCTIONS}")
        try:
            while True:
                mark = yield from until(marks, self.shows, self)
                marks = (START, CHANNEL, *ENDS)
                if mark in ENDS:
                    continue
                yield from self.attempt(mark, self._message(mark))
        except EndOfText:
            return

    def _message(self, mark: str) -> Reading[None]:
        header = mark + (yield from self._header())
        recipient, channel = RECIPIENT.search(header), CHANNEL_NAME.search(header)
        if channel is None:
            raise Malformed
        if recipient is not None:
            if not recipient.group(1).startswith(FUNCTIONS):
                raise Malformed
            name = recipient.group(1).removeprefix(FUNCTIONS)
            return (yield from read_arguments(self, name, (yield from after_blanks())))
        self.settle()
        show = self._thinks if channel.group(1) == "analysis" else self.shows
        self._again((yield from until((START, CHANNEL, *ENDS), show, self)))

    def _header(self) -> Reading[str]:
        header = ""
        while not header.endswith(MESSAGE):
            if len(header) > HEADER_CHARS_MAX or header.endswith((*ENDS, START)):
                raise Malformed
            header += yield
        return header

    def _again(self, mark: str) -> None:
        self.keep()
        if mark not in ENDS:
            self._pending.extendleft(reversed(mark))

    def shows(self, text: str) -> None:
        """See `CallParser.shows`; here blanks are no part of the marks."""
        self.emit(Content(text))
        self.keep()

    def _thinks(self, text: str) -> None:
        self.emit(self._thought(text))
        self.keep()
