"""Calls of tools in an answer's text: found where their marks are, read one by one."""

from collections.abc import Mapping
from typing import Any, Protocol

from disagg.router.message_parts.parts import CallArguments, CallStart, Content
from disagg.router.message_parts.text_reader import (
    EndOfText,
    Malformed,
    Reading,
    TextReader,
    until,
)

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools that may be called: name to the JSON schema of its arguments."""


class CallSyntax(Protocol):
    """How the models of a family write calls.

    Attributes:
        marks: each begins a block of calls, wherever it stands.
        openings: characters that begin one where they are the first of the answer that is no blank.
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """See the class."""

    @property
    def openings(self) -> str:
        """See the class."""

    def read_block(self, mark: str, calls: "CallParser") -> Reading[None]:
        """Read the calls behind a mark (or an opening) up to the end of the block.

        Raises:
            Malformed: this is no block of calls, or not any more.
        """


class CallParser(TextReader):
    """Text to content and calls.

    What turns out to be no call is content again, to the character: also a call of a tool that the
    request does not have. A call is shown once its name and the beginning of its arguments are
    certain; should its arguments then cease to be JSON, they stay as far as they were, and the
    rest is content. White space between calls, and before the first one where nothing else is
    there, belongs to the marks.

    Attributes:
        schemas: see `Schemas`.
    """

    def __init__(self, syntax: CallSyntax, schemas: Schemas) -> None:
        self.schemas = schemas
        self._syntax = syntax
        self._num_calls = 0
        self._blanks = ""
        self._settled = False
        """What is being read is what its mark said."""
        self._blanks_count = False
        """Content was shown since the last call, so blanks are content as well."""
        super().__init__()

    def read(self) -> Reading[None]:
        """See `TextReader.read`."""
        first = True
        try:
            while True:
                mark = yield from (self._first_mark() if first else self._next_mark())
                first = False
                yield from self.attempt(mark, self._syntax.read_block(mark, self))
        except EndOfText:
            if self._blanks and not self._num_calls:
                self.emit(Content(self._blanks))

    def starts(self, name: str) -> None:
        """A call with this name begins; Malformed unless there is such a tool."""
        if name not in self.schemas:
            raise Malformed
        self._blanks, self._blanks_count = "", False
        self.emit(CallStart(self._num_calls, name))
        self._num_calls += 1
        self.settle()

    def settle(self) -> None:
        """What is being read is certain: its mark is no text, whatever comes."""
        self._settled = True
        self.keep()

    def argues(self, text: str) -> None:
        """More text of the arguments of the call that began last."""
        self.emit(CallArguments(self._num_calls - 1, text))
        self.keep()

    def shows(self, text: str) -> None:
        """Text that is no part of a call."""
        if self._blanks_count:
            self.emit(Content(text))
            return
        self._blanks += text
        if not text.isspace():
            self.emit(Content(self._blanks))
            self._blanks, self._blanks_count = "", True

    def _first_mark(self) -> Reading[str]:
        if self._syntax.openings:
            while True:
                char = yield
                if not char.isspace():
                    break
                self.shows(char)
            if char in self._syntax.openings:
                return char
            self.keep()
            self._pending.appendleft(char)
        return (yield from self._next_mark())

    def _next_mark(self) -> Reading[str]:
        return (yield from until(self._syntax.marks, self._shows_and_keeps, self))

    def _shows_and_keeps(self, text: str) -> None:
        self.shows(text)
        self.keep()

    def attempt(self, mark: str, reading: Reading[None]) -> Reading[None]:
        """Read what is behind a mark; where it is malformed, what no call has used is text."""
        self.keep()
        self._settled = False
        try:
            yield from reading
        except Malformed:
            self.give_back()
            if not self._settled:
                self.shows(mark)
        else:
            self.keep()
