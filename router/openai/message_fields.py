"""The fields of an assistant's message, all at once or as deltas."""

import hashlib
import math
from typing import Any

from pydantic_core import from_json

from disagg.messages.outputs import FinishReason
from disagg.router.message_parts.message_parser import MessageParser
from disagg.router.message_parts.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    merged,
)
from disagg.router.openai.sse import to_json
from disagg.router.text_stream import Piece

CALL_ID_BYTES = 12
TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls, if its last call is whole."""


def call_id(answer_id: str, index: int) -> str:
    """The id of a call: the same wherever and whenever an answer is parsed."""
    name = f"{answer_id}/{index}".encode()
    return "call_" + hashlib.blake2b(name, digest_size=CALL_ID_BYTES).hexdigest()


class MessageFields:
    """Turns the pieces of one answer into reasoning, content and calls.

    Without parser all text is content.
    """

    def __init__(
        self, parser: MessageParser | None, answer_id: str, *, several_calls: bool = True
    ) -> None:
        self._parser = parser
        self._answer_id = answer_id
        self._calls_max = math.inf if several_calls else 1
        self._num_calls = 0
        self._arguments: list[str] = []
        """Of the last call, in pieces."""

    @property
    def reads_marks(self) -> bool:
        """Whether the marks of messages have to be in the text."""
        return self._parser is not None

    def parts(self, piece: Piece) -> list[Part]:
        """What a piece adds."""
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        parts = self._parser.push(piece.text)
        if piece.finish_reason:
            parts = merged(parts + self._parser.finish())
        # A second call where the client takes one only would be one that it did not ask for.
        parts = [part for part in parts if _call_index(part) < self._calls_max]
        for part in parts:
            if isinstance(part, CallStart):
                self._num_calls += 1
                self._arguments.clear()
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)
        return parts

    def finish_reason(self, piece: Piece) -> str:
        """Of a piece whose parts were taken."""
        if piece.finish_reason == FinishReason.STOP.value and self._num_calls and self._is_whole():
            return TOOL_CALLS
        return piece.finish_reason

    def _is_whole(self) -> bool:
        """Whether the last call has all of its arguments: no stop string has cut them off."""
        self._arguments = ["".join(self._arguments)]
        try:
            from_json(self._arguments[0])
        except ValueError:
            return False
        return True

    def delta(self, parts: list[Part]) -> bytes:
        """Parts as the ``delta`` of a chunk, in JSON."""
        if len(parts) == 1 and isinstance(parts[0], Content):  # the usual case
            return b'{"content":' + to_json(parts[0].text) + b"}"
        return to_json(self._fields(parts, with_index=True))

    def message(self, parts: list[Part]) -> dict[str, Any]:
        """All parts of an answer as its ``message``."""
        fields = self._fields(parts, with_index=False)
        content = fields.pop("content", None if "tool_calls" in fields else "")
        return {"role": "assistant", "content": content} | fields

    def _fields(self, parts: list[Part], *, with_index: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Content(text):
                    fields["content"] = fields.get("content", "") + text
                case Reasoning(text):
                    fields["reasoning_content"] = fields.get("reasoning_content", "") + text
                case CallStart(index, name):
                    calls[index] = ({"index": index} if with_index else {}) | {
                        "id": call_id(self._answer_id, index),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            fields["tool_calls"] = list(calls.values())
        return fields


def _call_index(part: Part) -> int:
    return part.index if isinstance(part, CallStart | CallArguments) else 0
