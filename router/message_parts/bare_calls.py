"""Calls without marks of their own: Llama's and Gemma's."""

from disagg.router.message_parts import json_calls, python_calls
from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.text_reader import (
    EndOfText,
    Malformed,
    Reading,
    after_blanks,
    expect,
)

PYTHON, PYTHON_END = "<|python_start|>", "<|python_end|>"
FENCE_END = "```"
FENCES = ("```tool_call", "```tool_code", "```json", "```python")


class LlamaCalls:
    """A list of Python calls, or JSON objects with ``;`` between them.

    They are the whole answer from its beginning on, or stand between marks.
    """

    marks: tuple[str, ...] = (PYTHON,)
    openings = "[{"

    def read_block(self, mark: str, calls: CallParser) -> Reading[None]:
        """See `CallSyntax`."""
        if mark == PYTHON:
            yield from read_any(calls, (yield from after_blanks()))
            yield from expect(PYTHON_END, (yield from after_blanks()))
        else:
            yield from read_any(calls, mark)


class GemmaCalls:
    """Python calls or JSON in a fenced block, or as Llama has them."""

    marks: tuple[str, ...] = FENCES
    openings = "[{"

    def read_block(self, mark: str, calls: CallParser) -> Reading[None]:
        """See `CallSyntax`."""
        if mark not in FENCES:
            return (yield from read_any(calls, mark))
        char = yield from after_blanks()
        while char != FENCE_END[0]:
            reads_list = char in "[{"
            yield from (read_any if reads_list else python_calls.read_call)(calls, char)
            char = yield from after_blanks()
        yield from expect(FENCE_END, char)


def read_any(calls: CallParser, first: str) -> Reading[None]:
    """Read one call, or several, in Python or in JSON, of which the first character was read."""
    if first == "[":
        char = yield from after_blanks()
        if char == "{":
            yield from json_calls.read_calls(calls, char, ",", "]")
        else:
            yield from python_calls.read_list(calls, char)
        return
    if first != "{":
        raise Malformed
    yield from json_calls.read_call(calls, first)
    while True:
        calls.keep()
        try:
            char = yield from after_blanks()
        except EndOfText:
            return
        if char != ";":
            calls.give_back()
            return
        yield from json_calls.read_call(calls, (yield from after_blanks()))
