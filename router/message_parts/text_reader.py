"""Reading a text that arrives in pieces, written as if it came character by character.

What is read does not depend on where the pieces end: a reader is a generator that gets one
character at each ``yield``, and nothing else.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from disagg.router.message_parts.parts import Part, merged

_T = TypeVar("_T")
Reading = Generator[None, str, _T]
"""Takes a character at each ``yield``; at the end of the text `EndOfText` is raised there."""


class Malformed(Exception):
    """What was read is not what was expected; it comes out as text."""


class EndOfText(Malformed):
    """No more characters come."""


class TextReader:
    """Drives one generator, `read`, which emits parts; subclasses write it."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._pending: deque[str] = deque()
        self._taken: list[str] = []
        """Characters read since they were last kept: what `give_back` can return."""
        self.plain: tuple[frozenset[str], Callable[[str], None]] | None = None
        """While set: all but these characters is only shown, so runs of it need no generator."""
        self._reading = self.read()
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """Read more text and return what is certain now."""
        at = 0
        while at < len(text):
            if self.plain is not None:
                marks, show = self.plain
                end = next((i for i in range(at, len(text)) if text[i] in marks), len(text))
                if end > at:
                    show(text[at:end])
                    at = end
                    continue
            self._pending.append(text[at])
            self._drain()
            at += 1
        return self._emitted()

    def finish(self) -> list[Part]:
        """Return what was held back, once no more text comes."""
        while True:
            try:
                self._drain()
                self._reading.throw(EndOfText)
            except StopIteration:
                return self._emitted()

    def read(self) -> Reading[None]:
        """The generator itself; it ends at the end of the text only."""
        raise NotImplementedError

    def emit(self, part: Part) -> None:
        """Add a part to what the next push or finish returns."""
        self._parts.append(part)

    def keep(self) -> None:
        """What was read until here is used and cannot be given back any more."""
        self._taken.clear()

    def give_back(self) -> None:
        """What was read since the last `keep` is to be read again."""
        self._pending.extendleft(reversed(self._taken))
        self._taken.clear()

    def unread(self) -> None:
        """The last character is to be read again."""
        self._pending.appendleft(self._taken.pop())

    def _drain(self) -> None:
        pending, taken, send = self._pending, self._taken, self._reading.send
        while pending:
            char = pending.popleft()
            taken.append(char)
            send(char)

    def _emitted(self) -> list[Part]:
        parts, self._parts = merged(self._parts), []
        return parts


def until(
    marks: Sequence[str], show: Callable[[str], None], reader: TextReader | None = None
) -> Reading[str]:
    """Read up to the first of some marks and return which; what is before it is shown.

    With ``reader`` it goes faster, and what is shown cannot be given back.

    Raises:
        EndOfText: after the last text was shown.
    """
    firsts = frozenset(mark[0] for mark in marks)
    held = ""
    try:
        while True:
            if reader is not None and not held:
                reader.plain = firsts, show
            char = yield
            if reader is not None:
                reader.plain = None
            if not held and char not in firsts:
                show(char)
                continue
            held += char
            while held and not any(mark.startswith(held) for mark in marks):
                show(held[0])
                held = held[1:]
            if held in marks:
                return held
    except EndOfText:
        if held:
            show(held)
        raise
    finally:
        if reader is not None:
            reader.plain = None


def text_until(mark: str) -> Reading[str]:
    """Read up to a mark and return what is before it."""
    read: list[str] = []
    yield from until([mark], read.append)
    return "".join(read)


def after_blanks() -> Reading[str]:
    """The next character that is no white space."""
    while True:
        char = yield
        if not char.isspace():
            return char


def expect(text: str, first: str = "") -> Reading[None]:
    """Read exactly this text, of which ``first`` was read already; Malformed otherwise."""
    if not text.startswith(first):
        raise Malformed
    for wanted in text[len(first) :]:
        char = yield
        if char != wanted:
            raise Malformed
