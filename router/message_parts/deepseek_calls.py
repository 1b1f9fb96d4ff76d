"""Blocks of calls as DeepSeek-V3, R1 and V3.1 write them."""

from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.json_calls import read_arguments
from disagg.router.message_parts.text_reader import (
    Malformed,
    Reading,
    after_blanks,
    expect,
    text_until,
)

BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"


class DeepSeekCalls:
    """``function`` SEPARATOR name and fenced JSON (V3, R1), or name SEPARATOR JSON (V3.1)."""

    marks = (BLOCK,)
    openings = ""

    def read_block(self, mark: str, calls: CallParser) -> Reading[None]:
        """See `CallSyntax`."""
        while True:
            yield from expect("<｜tool▁call", (yield from after_blanks()))
            char = yield
            if char == "s":
                return (yield from expect(BLOCK_END.removeprefix("<｜tool▁call"), char))
            yield from expect(CALL.removeprefix("<｜tool▁call"), char)
            yield from self._call(calls)
            yield from expect(CALL_END, (yield from after_blanks()))

    def _call(self, calls: CallParser) -> Reading[None]:
        name = (yield from text_until(SEPARATOR)).strip()
        char = yield from after_blanks()
        if char == "{":
            return (yield from read_arguments(calls, name))
        if name != "function":
            raise Malformed
        name = char + (yield from text_until("\n"))
        yield from expect(FENCE, (yield from after_blanks()))
        yield from read_arguments(calls, name.strip(), (yield from after_blanks()))
        yield from expect(FENCE_END, (yield from after_blanks()))
