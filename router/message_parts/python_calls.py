"""Calls as Python writes them: ``name(key=value, …)`` with literals."""

import ast
from typing import Any

from disagg.router.message_parts.call_parser import CallParser
from disagg.router.message_parts.json_text import to_json
from disagg.router.message_parts.text_reader import Malformed, Reading, after_blanks, expect

DEPTH_MAX = 64
JSON_WORDS = {"true": True, "false": False, "null": None}


def read_call(calls: CallParser, first: str) -> Reading[None]:
    """Read a call, of which the first character was read already."""
    name, char = yield from _name(first, "(")
    if char != "(" or name not in calls.schemas:
        raise Malformed
    names: set[str] = set()
    first = yield from after_blanks()
    while first != ")":
        key, char = yield from _name(first, "=")
        if char != "=" or key in names:
            raise Malformed
        text, end = yield from _expression()
        shown = to_json(key) + ": " + _json(text)
        if not names:
            calls.starts(name)
        calls.argues((", " if names else "{") + shown)
        names.add(key)
        first = ")" if end == ")" else (yield from after_blanks())
    if not names:
        calls.starts(name)
    calls.argues("}" if names else "{}")


def read_list(calls: CallParser, first: str) -> Reading[None]:
    """Read calls with commas between them up to the closing bracket, the first character given."""
    while True:
        yield from read_call(calls, first)
        char = yield from after_blanks()
        if char != ",":
            return (yield from expect("]", char))
        first = yield from after_blanks()


def _name(first: str, end: str) -> Reading[tuple[str, str]]:
    """An identifier (with dots, as names of tools have them) and what follows it."""
    name, char = "", first
    while char.isalnum() or char in "_.-":
        name += char
        char = yield
    if char != end and char.isspace():
        char = yield from after_blanks()
    if not name:
        raise Malformed
    return name, char


def _expression() -> Reading[tuple[str, str]]:
    """A value's text and the comma or parenthesis behind it."""
    text, depth, quote = "", 0, ""
    while True:
        char = yield
        if quote:
            if char == "\\":
                text += char
                char = yield
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in ",)" and depth == 0:
            return text, char
        elif char in "([{":
            depth += 1
            if depth > DEPTH_MAX:
                raise Malformed
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                raise Malformed
        text += char


def _json(text: str) -> str:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return to_json(ast.literal_eval(_Words().visit(tree)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


class _Words(ast.NodeTransformer):
    """JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.Constant(JSON_WORDS[node.id]) if node.id in JSON_WORDS else node
