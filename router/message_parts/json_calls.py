"""Calls as JSON objects: ``{"name": …, "arguments": {…}}`` or ``parameters`` for it."""

import json
import re
from typing import Any

from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.json_text import JsonObject, to_json
from disagg.router.message_parts.text_reader import Malformed, Reading, after_blanks, expect

HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*\{'
)
"""What a call begins with as models are taught to write it: its arguments can be shown at once."""


def read_arguments(calls: CallParser, name: str, first: str = "{") -> Reading[None]:
    """Read the object of a call's arguments, of which the first character was read already."""
    if first != "{":
        raise Malformed
    json_object = JsonObject()
    json_object.push(first)
    calls.starts(name)
    calls.argues(first)
    while json_object.depth:
        char = yield
        if not json_object.push(char):
            raise Malformed
        calls.argues(char)


def read_call(calls: CallParser, first: str) -> Reading[None]:
    """Read a call, of which the first character was read already."""
    if first != "{":
        raise Malformed
    json_object = JsonObject()
    json_object.push(first)
    text = first
    while json_object.depth:
        char = yield
        if not json_object.push(char):
            raise Malformed
        text += char
        if char == "{" and json_object.depth == 2 and (head := HEAD.fullmatch(text)):
            yield from read_arguments(calls, json.loads(head.group(1)))
            # Whatever else the object may have says nothing about the call.
            json_object.push("}")
            while json_object.depth:
                char = yield
                if not json_object.push(char):
                    raise Malformed
            return
    _whole_call(calls, text)


def read_calls(calls: CallParser, first: str, separator: str, end: str) -> Reading[None]:
    """Read calls with a separator between them, the first character given, up to ``end``."""
    while True:
        yield from read_call(calls, first)
        char = yield from after_blanks()
        if char != separator:
            break
        first = yield from after_blanks()
    yield from expect(end, char)


def _whole_call(calls: CallParser, text: str) -> None:
    call: Any = json.loads(text)
    call = call.get("function") if isinstance(call.get("function"), dict) else call
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # as OpenAI's own messages have them
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise Malformed from None
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict | None):
        raise Malformed
    shown = to_json(arguments or {})
    calls.starts(call["name"])
    calls.argues(shown)
