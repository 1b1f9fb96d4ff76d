"""The ``logprobs`` of an answer, in the form of each endpoint."""

from typing import Any

from disagg.messages.sampling import TokenLogprobs
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.text_stream import Piece
from disagg.router.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0
"""Shown for an impossible token: JSON has no infinity."""


class CompletionLogprobs:
    """Four lists in step, one entry per token. ``text_offset`` counts on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._num_chars = 0

    def of(self, piece: Piece) -> dict[str, list[Any]]:
        """The lists for the tokens of the next piece."""
        shown = _lists()
        for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
            self._add(shown, token_id, logprobs, len(logprobs.top))
        return shown

    def of_prompt(self, prompt: ShownPrompt, echo: str) -> dict[str, list[Any]]:
        """The lists for a prompt with this text; pieces come behind it."""
        shown, marked = _lists(), echo if prompt.echo_has_marks else ""
        scores = prompt.logprobs or (None,) * len(prompt.token_ids)
        for token_id, logprobs in zip(prompt.token_ids, scores, strict=True):
            self._add(shown, token_id, logprobs, prompt.num_echo_logprobs or 0, marked)
        self._num_chars = len(echo)
        return shown

    def _add(
        self,
        shown: dict[str, list[Any]],
        token_id: int,
        logprobs: TokenLogprobs | None,
        num_top: int,
        marked: str = "",
    ) -> None:
        """Add a token; ``marked`` is the text that it came from, if special ones may stand there.

        One that the tokenizer has put before a text does not stand in it.
        """
        name = self._token_name
        shown["tokens"].append(name(token_id))
        shown["token_logprobs"].append(None if logprobs is None else _shown(logprobs.logprob))
        top = {} if logprobs is None else {name(i): _shown(v) for i, v in logprobs.top[:num_top]}
        if top and logprobs is not None:  # also the token's own, as OpenAI has it
            top.setdefault(name(token_id), _shown(logprobs.logprob))
        shown["top_logprobs"].append(top or None)
        shown["text_offset"].append(self._num_chars)
        skip = self._skip_special_tokens or bool(marked)
        if self._tokenizer.shows(token_id, skip_special_tokens=skip):
            # A character split over tokens counts where it begins.
            raw = self._tokenizer.token_bytes(token_id)
            self._num_chars += sum(byte & 0xC0 != 0x80 for byte in raw)
        elif marked.startswith(mark := name(token_id), self._num_chars):
            self._num_chars += len(mark)

    def _token_name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # OpenAI's way to show a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


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


def prompt_fields(prompt: ShownPrompt, tokenizer: Tokenizer) -> dict[str, Any]:
    """The field ``prompt_logprobs`` in vLLM's form, where it is asked for.

    Per token null or an object of token ids: the token's own and those of the best.
    """
    number = prompt.num_logprobs
    if number is None:
        return {}

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": _shown(logprob), "rank": rank, "decoded_token": text}

    shown: list[dict[str, Any] | None] = []
    for token_id, one in zip(prompt.token_ids, prompt.logprobs, strict=True):
        if one is None:
            shown.append(None)
            continue
        found = {str(token_id): entry(token_id, one.logprob, one.rank)}
        for rank, (best, logprob) in enumerate(one.top[:number], 1):
            found.setdefault(str(best), entry(best, logprob, rank))
        shown.append(found)
    return {"prompt_logprobs": shown}


def _shown(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
