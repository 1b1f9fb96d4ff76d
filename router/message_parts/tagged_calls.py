"""Blocks of calls between tags: Qwen, Hermes and Nemotron-H."""

from disagg.router.message_parts import json_calls, xml_calls
from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.text_reader import Malformed, Reading, after_blanks, expect

CALL, CALL_END = "<tool_call>", "</tool_call>"
LIST, LIST_END = "<TOOLCALL>", "</TOOLCALL>"


class TaggedCalls:
    """``<tool_call>`` with JSON or XML in it, ``<TOOLCALL>`` with a list of JSON."""

    marks = (CALL, LIST)
    openings = ""

    def read_block(self, mark: str, calls: CallParser) -> Reading[None]:
        """See `CallSyntax`."""
        char = yield from after_blanks()
        if mark == LIST:
            if char != "[":
                raise Malformed
            char = yield from after_blanks()
            yield from json_calls.read_calls(calls, char, ",", "]")
            return (yield from expect(LIST_END, (yield from after_blanks())))
        read = xml_calls.read_function if char == "<" else json_calls.read_call
        yield from read(calls, char)
        yield from expect(CALL_END, (yield from after_blanks()))
