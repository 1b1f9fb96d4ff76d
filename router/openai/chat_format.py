"""The answers of the chat completions endpoint."""

import json
from typing import Any

from disagg.errors import DisaggError
from disagg.router.message_parts.parts import Part
from disagg.router.openai.answer import Answer
from disagg.router.openai.errors import error_body
from disagg.router.openai.logprobs import ChatLogprobs, prompt_fields
from disagg.router.openai.message_fields import MessageFields
from disagg.router.openai.sse import DONE, sse, to_json
from disagg.router.text_stream import Piece


class ChatFormat:
    """Bodies and chunks of ``chat.completion``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    done = DONE

    def __init__(self, answer: Answer, num_logprobs: int | None, fields: MessageFields) -> None:
        self._answer = answer
        self._fields = fields
        self._parts: list[Part] = []
        self._finish_reason = ""
        self._logprobs = None if num_logprobs is None else ChatLogprobs(answer.tokenizer)
        self._head, self._tail = answer.chunk_frame(self.chunk_kind)
        self._collected: list[dict[str, Any]] = []

    def first_chunk(self) -> bytes:
        """The role comes before any text."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._head + delta + self._tail

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        self._answer.count(piece)
        parts = self._fields.parts(piece)
        logprobs = b"null"
        if self._logprobs and piece.token_ids:
            logprobs = to_json({"content": self._logprobs.of(piece)})
        elif not parts and not piece.finish_reason:
            return b""
        delta = to_json(self._fields.delta(parts))
        reason = json.dumps(self._fields.finish_reason(piece) or None).encode()
        return b"".join(
            (
                self._head,
                b'"delta":',
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                reason,
                self._tail,
            )
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""
        return sse(self._answer.frame(self.chunk_kind) | {"choices": [], "usage": usage})

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last chunk of a stream that is not complete."""
        return sse(error_body(error))

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._answer.count(piece)
        self._parts += self._fields.parts(piece)
        self._finish_reason = self._fields.finish_reason(piece)
        if self._logprobs:
            self._collected += self._logprobs.of(piece)

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choice = {
            "index": 0,
            "message": self._fields.message(self._parts),
            "logprobs": {"content": self._collected} if self._logprobs else None,
            "finish_reason": self._finish_reason,
        }
        frame = self._answer.frame(self.kind) | {"choices": [choice], "usage": usage}
        return frame | prompt_fields(self._answer.prompt, self._answer.tokenizer)
