"""The ``logprobs`` of an answer, in the form of each endpoint."""

from typing import Any

from disagg.router.text_stream import Piece
from disagg.router.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0
"""Shown for an impossible token: JSON has no infinity."""


class CompletionLogprobs:
    """Four lists in step, one entry per token. ``text_offset`` counts on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_chars = 0

    def of(self, piece: Piece) -> dict[str, list[Any]]:
        """The lists for the tokens of the next piece."""
        shown: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        name = self._token_name
        for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
            shown["tokens"].append(name(token_id))
            shown["token_logprobs"].append(_shown(logprobs.logprob))
            shown["top_logprobs"].append(
                {name(i): _shown(value) for i, value in logprobs.top} or None
            )
            shown["text_offset"].append(self._num_chars)
            raw = self._tokenizer.token_bytes(token_id)
            # A character split over tokens counts where it begins.
            self._num_chars += sum(byte & 0xC0 != 0x80 for byte in raw)
        return shown

    def _token_name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # OpenAI's way to show a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """One object per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        """The objects for the tokens of a piece."""
        token = self._token
        return [
            token(token_id, logprobs.logprob)
            | {"top_logprobs": [token(i, value) for i, value in logprobs.top]}
            for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True)
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode(errors="replace"),
            "logprob": _shown(logprob),
            "bytes": list(raw),
        }


def _shown(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
