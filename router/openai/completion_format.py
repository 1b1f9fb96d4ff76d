"""The answers of the completions endpoint."""

import json
from typing import Any

from disagg.errors import DisaggError
from disagg.router.openai.answer import Answer
from disagg.router.openai.errors import error_body
from disagg.router.openai.logprobs import CompletionLogprobs, prompt_fields
from disagg.router.openai.sse import DONE, sse, to_json
from disagg.router.text_stream import Piece


class CompletionFormat:
    """Bodies and chunks of ``text_completion``."""

    kind = "text_completion"

    done = DONE

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
        text, logprobs = self._begun(piece)
        if not text and not piece.finish_reason and logprobs is None:
            return b""
        shown = b"null" if logprobs is None else to_json(logprobs)
        reason = json.dumps(piece.finish_reason or None).encode()
        return b"".join(
            (
                self._head,
                b'"text":',
                json.dumps(text).encode(),
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

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last chunk of a stream that is not complete."""
        return sse(error_body(error))

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        text, logprobs = self._begun(piece)
        self._answer.texts.append(text)
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
        } | prompt_fields(self._answer.prompt, self._answer.tokenizer)
        return self._answer.frame(self.kind) | {"choices": [choice], "usage": usage}

    def _begun(self, piece: Piece) -> tuple[str, dict[str, list[Any]] | None]:
        """Text and logprobs of the next piece, behind the prompt's where that is to be shown."""
        self._answer.count(piece)
        prompt = self._answer.prompt
        echo = prompt.take_echo()
        shown: dict[str, list[Any]] | None = None
        if echo is not None and self._logprobs:
            shown = self._logprobs.of_prompt(prompt, len(echo))
        if self._logprobs and piece.token_ids:
            own = self._logprobs.of(piece)
            shown = own if shown is None else {name: shown[name] + own[name] for name in shown}
        return (echo or "") + piece.text, shown
