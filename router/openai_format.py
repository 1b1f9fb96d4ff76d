"""The OpenAI answers: JSON bodies and preformatted SSE chunks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.errors import DisaggError
from disagg.messages.sampling import TokenLogprobs
from disagg.router.text_stream import Piece
from disagg.router.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0
"""Shown for an impossible token: JSON has no infinity."""


def error_body(error: DisaggError) -> dict[str, Any]:
    """The OpenAI error schema; the message starts with the field at fault."""
    message = f"{error.param}: {error.message}" if error.param else error.message
    return {
        "error": {
            "message": message,
            "type": error.type,
            "param": error.param or None,
            "code": error.code,
        }
    }


def usage_body(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Token counts of one request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def to_json(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def _shown(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


@dataclass(slots=True)
class Answer:
    """What an answer of either kind collects while pieces arrive."""

    response_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    with_usage_field: bool = False
    """Streams that end with a usage chunk carry ``usage: null`` until then."""
    texts: list[str] = field(default_factory=list, repr=False)
    num_tokens: int = 0
    finish_reason: str = ""
    num_chars: int = 0

    def count(self, piece: Piece) -> None:
        """Add a piece's tokens to the usage."""
        self.num_tokens += len(piece.token_ids)
        self.num_chars += len(piece.text)
        self.finish_reason = piece.finish_reason

    def frame(self, kind: str) -> dict[str, Any]:
        """The fields every body and chunk begins with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def chunk_frame(self, kind: str) -> tuple[bytes, bytes]:
        """The bytes before and after a chunk's only choice."""
        head = b"data: " + to_json(self.frame(kind))[:-1] + b',"choices":[{"index":0,'
        return head, b'}],"usage":null}\n\n' if self.with_usage_field else b"}]}\n\n"


class Format(Protocol):
    """How one endpoint shows pieces."""

    def first_chunk(self) -> bytes:
        """What a stream begins with, if anything."""

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""


class CompletionFormat:
    """Bodies and chunks of ``text_completion``."""

    kind = "text_completion"

    def __init__(self, answer: Answer, num_logprobs: int | None) -> None:
        self._answer = answer
        self._num_logprobs = num_logprobs
        self._head, self._tail = answer.chunk_frame(self.kind)
        self._collected: dict[str, list[Any]] | None = None
        self._num_chars_of_tokens = 0

    def first_chunk(self) -> bytes:
        """Completions begin with their first text."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        self._answer.count(piece)
        logprobs = self._logprobs(piece)
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
        logprobs = self._logprobs(piece)
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

    def _logprobs(self, piece: Piece) -> dict[str, list[Any]] | None:
        if self._num_logprobs is None or not piece.token_ids:
            return None
        shown: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        name = self._token_name
        for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
            token = name(token_id)
            shown["tokens"].append(token)
            shown["token_logprobs"].append(_shown(logprobs.logprob))
            shown["top_logprobs"].append(
                {name(i): _shown(value) for i, value in logprobs.top} or None
            )
            shown["text_offset"].append(self._num_chars_of_tokens)
            raw = self._answer.tokenizer.token_bytes(token_id)
            # A character split over tokens counts where it begins.
            self._num_chars_of_tokens += sum(byte & 0xC0 != 0x80 for byte in raw)
        return shown

    def _token_name(self, token_id: int) -> str:
        raw = self._answer.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # OpenAI's way to show a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat:
    """Bodies and chunks of ``chat.completion``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, answer: Answer, num_logprobs: int | None) -> None:
        self._answer = answer
        self._num_logprobs = num_logprobs
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
        if self._num_logprobs is not None and piece.token_ids:
            logprobs = to_json({"content": self._logprobs(piece)})
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
        if self._num_logprobs is not None:
            self._collected += self._logprobs(piece)

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self._answer.texts)},
            "logprobs": {"content": self._collected} if self._num_logprobs is not None else None,
            "finish_reason": self._answer.finish_reason,
        }
        return self._answer.frame(self.kind) | {"choices": [choice], "usage": usage}

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            self._token(token_id, logprobs.logprob) | {"top_logprobs": self._top(logprobs)}
            for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True)
        ]

    def _top(self, logprobs: TokenLogprobs) -> Sequence[dict[str, Any]]:
        return [self._token(token_id, value) for token_id, value in logprobs.top]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._answer.tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode(errors="replace"),
            "logprob": _shown(logprob),
            "bytes": list(raw),
        }
