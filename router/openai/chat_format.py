"""The answers of the chat completions endpoint."""

import json
from typing import Any

from disagg.router.openai.answer import Answer
from disagg.router.openai.logprobs import ChatLogprobs, prompt_fields
from disagg.router.openai.sse import sse, to_json
from disagg.router.text_stream import Piece


class ChatFormat:
    """Bodies and chunks of ``chat.completion``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, answer: Answer, num_logprobs: int | None) -> None:
        self._answer = answer
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
        logprobs = b"null"
        if self._logprobs and piece.token_ids:
            logprobs = to_json({"content": self._logprobs.of(piece)})
        elif not piece.text and not piece.finish_reason:
            return b""
        delta = b'{"content":' + json.dumps(piece.text).encode() + b"}" if piece.text else b"{}"
        reason = json.dumps(piece.finish_reason or None).encode()
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

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._answer.count(piece)
        self._answer.texts.append(piece.text)
        if self._logprobs:
            self._collected += self._logprobs.of(piece)

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self._answer.texts)},
            "logprobs": {"content": self._collected} if self._logprobs else None,
            "finish_reason": self._answer.finish_reason,
        }
        frame = self._answer.frame(self.kind) | {"choices": [choice], "usage": usage}
        return frame | prompt_fields(self._answer.prompt, self._answer.tokenizer)
