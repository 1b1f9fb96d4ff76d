"""Where a JSON text ends, and whether it can still become one, a character at a time."""

import json
import re

DEPTH_MAX = 128
NUMBER_CHARS_MAX = 400
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = ("true", "false", "null")
BLANKS = " \t\n\r"


class JsonObject:
    """Follows the text of one JSON object from its opening brace on.

    Attributes:
        depth: open brackets; 0 before the first and after the last character.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._next = "value"
        """What may come: value, first (a value or the end), key, first key, colon, more."""
        self._scalar = ""
        """The number or word that has begun."""
        self._string = ""
        """Empty, or how far in a string: text, escape, or the hex digits that are due."""
        self._is_key = False

    @property
    def depth(self) -> int:
        """See the class."""
        return len(self._open)

    def push(self, char: str) -> bool:
        """Take one character and return whether the text goes on to be JSON."""
        if self._string:
            return self._in_string(char)
        if self._scalar:
            if char not in ",]}" + BLANKS:
                self._scalar += char
                return self._scalar_can_go_on()
            if not (self._scalar in WORDS or NUMBER.fullmatch(self._scalar)):
                return False
            self._scalar, self._next = "", "more"
        if char in BLANKS:
            return bool(self._open)
        return self._between(char)

    def _between(self, char: str) -> bool:
        expected = self._next
        if char == '"' and expected in ("value", "first", "key", "first key"):
            self._string, self._is_key = "text", expected.endswith("key")
            return bool(self._open)
        if char in "]}":
            fits = expected in ("more", "first" if char == "]" else "first key")
            if not (fits and self._open and self._open.pop() == {"]": "[", "}": "{"}[char]):
                return False
            self._next = "more"
            return True
        if expected == "colon":
            self._next = "value"
            return char == ":"
        if expected == "more":
            if char != "," or not self._open:
                return False
            self._next = "key" if self._open[-1] == "{" else "value"
            return True
        if expected.endswith("key"):
            return False
        if char in "{[":
            self._open.append(char)
            self._next = "first key" if char == "{" else "first"
            return len(self._open) <= DEPTH_MAX and self._open[0] == "{"
        self._scalar = char
        return bool(self._open) and self._scalar_can_go_on()

    def _in_string(self, char: str) -> bool:
        if self._string == "text":
            if char == '"':
                self._string, self._next = "", "colon" if self._is_key else "more"
            elif char == "\\":
                self._string = "escape"
            return char >= " "
        if self._string == "escape":
            self._string = "hhhh" if char == "u" else "text"
            return char in '"\\/bfnrtu'
        self._string = self._string[1:] or "text"
        return char in "0123456789abcdefABCDEF"

    def _scalar_can_go_on(self) -> bool:
        text = self._scalar
        if len(text) > NUMBER_CHARS_MAX:
            return False
        if any(word.startswith(text) for word in WORDS):
            return True
        # A number that is not complete is one with a digit more.
        return NUMBER.fullmatch(text) is not None or NUMBER.fullmatch(text + "0") is not None


def to_json(value: object) -> str:
    """A value as the text of arguments.

    Raises:
        ValueError: it has none in JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
