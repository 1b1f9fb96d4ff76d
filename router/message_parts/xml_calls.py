"""Calls as ``<function=NAME><parameter=KEY>value</parameter></function>`` (Qwen3-Coder's)."""

import json
from collections.abc import Mapping
from typing import Any

from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.json_text import to_json
from disagg.router.message_parts.text_reader import (
    Malformed,
    Reading,
    after_blanks,
    expect,
    text_until,
)

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"


def read_function(calls: CallParser, first: str) -> Reading[None]:
    """Read a call, of which the first character was read already.

    Values are text; those that the tool's schema has another type for are read as JSON.
    """
    yield from expect(FUNCTION, first)
    name = yield from text_until(">")
    if name not in calls.schemas:
        raise Malformed
    properties = calls.schemas[name].get("properties")
    names: set[str] = set()
    while True:
        char = yield from after_blanks()
        if char != "<":
            raise Malformed
        char = yield
        if char == "/":
            break
        yield from expect(PARAMETER[1:], char)
        key = yield from text_until(">")
        value = yield from text_until(PARAMETER_END)
        if key in names:
            raise Malformed
        text = to_json(key) + ": " + to_json(_value(value, _schema(properties, key)))
        if not names:
            calls.starts(name)
        calls.argues((", " if names else "{") + text)
        names.add(key)
    yield from expect(FUNCTION_END[2:])
    if not names:
        calls.starts(name)
    calls.argues("}" if names else "{}")


def _schema(properties: Any, key: str) -> Mapping[str, Any]:
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    declared = schema.get("type")
    types = declared if isinstance(declared, list) else [declared]
    if "string" in types and not (text == "null" and "null" in types):
        return text
    try:
        value = json.loads(text)
        to_json(value)  # NaN is none
    except (ValueError, RecursionError):
        return text
    return value
