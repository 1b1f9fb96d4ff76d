"""What the answers of all endpoints have alike."""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Protocol

from disagg.errors import DisaggError
from disagg.messages.frozen import dataclass
from disagg.messages.lazy import cached_property
from disagg.router.openai.answer_form import AnswerForm
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.openai.sse import text_to_json, to_json
from disagg.router.openai.usage import token_counts
from disagg.router.text_stream import Piece
from disagg.router.tokenizer import Tokenizer

TEXT = b"\0"
"""Stands for the text while a chunk is preformatted; JSON has no such byte."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What all choices of one answer share."""

    response_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[ShownPrompt] = field(repr=False)
    form: AnswerForm

    def __len__(self) -> int:
        return len(self.prompts) * self.form.num_each

    def frame(self, kind: str) -> dict[str, Any]:
        """The fields every body and chunk begins with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


class Choice:
    """What a choice of either kind collects while its pieces arrive.

    Attributes:
        index: in the answer.
        prompt: what it continues.
        num_tokens: generated so far.
        finish_reason: "" until it is complete.
    """

    def __init__(self, answer: Answer, index: int, chunk_kind: str) -> None:
        self.index = index
        self.prompt = answer.prompts[index // answer.form.num_each]
        self.num_tokens = 0
        self.finish_reason = ""
        self._form = answer.form
        self._token_ids: list[int] = []
        self._chunk_frame = answer.frame(chunk_kind)
        self._text_head = self._text_tail = b""

    @cached_property
    def _head(self) -> bytes:
        """What every chunk of a stream begins with."""
        frame = to_json(self._chunk_frame)[:-1]
        return b"data: " + frame + b',"choices":[{"index":%d,' % self.index

    def take(self, piece: Piece) -> None:
        """Count a piece, whichever way it is shown."""
        self.num_tokens += len(piece.token_ids)
        self.finish_reason = piece.finish_reason
        if piece.prompt_logprobs:
            self.prompt.take(piece)

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        if self._form.with_token_ids:
            self._token_ids += piece.token_ids

    def chunk(self, fields: bytes, piece: Piece | None = None, more: bytes = b"") -> bytes:
        """The SSE bytes of a chunk.

        Args:
            fields: the choice's, without braces.
            piece: whose tokens are shown where token ids are; None: no tokens yet.
            more: fields of the chunk, with a comma before.
        """
        ids = b""
        if self._form.with_token_ids and piece is not None:
            ids = b',"token_ids":' + to_json(piece.token_ids)
        usage = b""
        if self._form.with_running_usage:
            counts = token_counts(len(self.prompt.token_ids), self.num_tokens)
            usage = b',"usage":' + to_json(counts)
        elif self._form.with_usage_field:
            usage = b',"usage":null'
        return b"".join((self._head, fields, ids, b"}]", more, usage, b"}\n\n"))

    def preformat(self, before: bytes, after: bytes) -> bool:
        """Keep what stands around the text in those chunks in which nothing else differs.

        Args:
            before: the choice's fields before the text, without braces.
            after: those behind it.

        Returns:
            Whether there are such chunks, so that `text_chunk` is what `chunk` would be.
        """
        form = self._form
        if form.with_token_ids or form.with_running_usage or form.num_logprobs is not None:
            return False
        self._text_head, _, self._text_tail = self.chunk(before + TEXT + after).partition(TEXT)
        return True

    def text_chunk(self, text: str) -> bytes:
        """The SSE bytes of a chunk in which only the text is new; after `preformat`."""
        return self._text_head + text_to_json(text) + self._text_tail

    def shows_ids(self, piece: Piece) -> bool:
        """Whether there are token ids to show of a piece."""
        return self._form.with_token_ids and bool(piece.token_ids)

    def prompt_ids(self) -> dict[str, Any]:
        """The prompt's token ids where they are shown."""
        shown = self._form.with_token_ids
        return {"prompt_token_ids": list(self.prompt.token_ids)} if shown else {}

    def ids(self) -> dict[str, Any]:
        """The choice's own token ids where they are shown."""
        return {"token_ids": self._token_ids} if self._form.with_token_ids else {}


class Format(Protocol):
    """How one endpoint shows the pieces of an answer; each comes with its choice's index.

    Attributes:
        done: what ends a stream that is complete.
    """

    done: bytes

    def first_chunk(self) -> bytes:
        """What a stream begins with, if anything."""

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last chunk of a stream that is not complete."""

    def add(self, index: int, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
