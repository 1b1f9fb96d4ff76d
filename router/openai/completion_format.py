"""The answers of the completions endpoint."""

import json
from typing import Any

from disagg.router.openai.answer import Answer
from disagg.router.openai.logprobs import CompletionLogprobs
from disagg.router.openai.sse import sse, to_json
from disagg.router.text_stream import Piece


class CompletionFormat:
    """Bodies and chunks of ``text_completion``."""

    kind = "text_completion"

    def __init__(self, answer: Answer, num_logprobs: int | None) -> None:
        self._answer = answer
        self._logprobs = None if num_logprobs is None else CompletionLogprobs(answer.tokenizer)
        self._head, self._tail = answer.chunk_frame(self.kind)
        self._collected: dict[str, list[Any]] | None = None

    def first_chunk(self) -> bytes:
        """Completions begin with their first text."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        self._answer.count(piece)
        logprobs = self._logprobs_of(piece)
        if not piece.text and not piece.finish_reason and logprobs is None:
            return b""
        shown = b"null" if logprobs is None else to_json(logprobs)
        reason = json.dumps(piece.finish_reason or None).encode()
        text = json.dumps(piece.text).encode()
        return b"".join(
            (
                self._head,
                b'"text":',
                text,
                b',"logprobs":',
                shown,
                b',"finish_reason":',
                reason,
                self._tail,
            )
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""
        return sse(self._answer.frame(self.kind) | {"choices": [], "usage": usage})

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._answer.count(piece)
        self._answer.texts.append(piece.text)
        logprobs = self._logprobs_of(piece)
        if logprobs is not None:
            if self._collected is None:
                self._collected = logprobs
            else:
                for name, values in logprobs.items():
                    self._collected[name] += values

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choice = {
            "index": 0,
            "text": "".join(self._answer.texts),
            "logprobs": self._collected,
            "finish_reason": self._answer.finish_reason,
        }
        return self._answer.frame(self.kind) | {"choices": [choice], "usage": usage}

    def _logprobs_of(self, piece: Piece) -> dict[str, list[Any]] | None:
        return self._logprobs.of(piece) if self._logprobs and piece.token_ids else None
