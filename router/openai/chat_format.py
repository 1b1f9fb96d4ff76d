"""The answers of the chat completions endpoint."""

from collections.abc import Sequence
from typing import Any

from disagg.errors import DisaggError
from disagg.messages.lazy import cached_property
from disagg.router.message_parts.parts import Content, Part
from disagg.router.openai.answer import Answer, Choice
from disagg.router.openai.errors import error_body
from disagg.router.openai.logprobs import ChatLogprobs, prompt_fields
from disagg.router.openai.message_fields import MessageFields
from disagg.router.openai.sse import DONE, sse, to_json
from disagg.router.text_stream import Piece

CONTENT_TAIL = b'},"logprobs":null,"finish_reason":null'


class ChatFormat:
    """Bodies and chunks of ``chat.completion``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    done = DONE

    def __init__(self, answer: Answer, fields: Sequence[MessageFields]) -> None:
        """Take the fields of each choice's message."""
        self._answer = answer
        self._choices = [ChatChoice(answer, index, one) for index, one in enumerate(fields)]

    def first_chunk(self) -> bytes:
        """The roles come before any text."""
        return b"".join(choice.first_chunk() for choice in self._choices)

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        return self._choices[index].chunk(piece)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""
        return sse(self._answer.frame(self.chunk_kind) | {"choices": [], "usage": usage})

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last chunk of a stream that is not complete."""
        return sse(error_body(error))

    def add(self, index: int, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._choices[index].add(piece)

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choices = [choice.body() for choice in self._choices]
        frame = self._answer.frame(self.kind) | {"choices": choices, "usage": usage}
        return frame | self._choices[0].prompt_fields()


class ChatChoice:
    """One message of the assistant."""

    def __init__(self, answer: Answer, index: int, fields: MessageFields) -> None:
        self._choice = Choice(answer, index, ChatFormat.chunk_kind)
        self._fields = fields
        self._parts: list[Part] = []
        self._finish_reason = ""
        self._tokenizer = answer.tokenizer
        self._logprobs = None
        if answer.form.num_logprobs is not None:
            self._logprobs = ChatLogprobs(answer.tokenizer)
        self._collected: list[dict[str, Any]] = []
        self._all_is_content = not fields.reads_marks

    @cached_property
    def _is_preformatted(self) -> bool:
        return self._choice.preformat(b'"delta":{"content":', CONTENT_TAIL)

    def first_chunk(self) -> bytes:
        """The role, and the prompt's token ids where they are shown."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        ids = self._choice.prompt_ids()
        return self._choice.chunk(delta, more=b"," + to_json(ids)[1:-1] if ids else b"")

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        choice = self._choice
        choice.take(piece)
        is_usual = self._is_preformatted and not piece.finish_reason
        if is_usual and self._all_is_content:
            return choice.text_chunk(piece.text) if piece.text else b""
        parts = self._fields.parts(piece)
        if is_usual and len(parts) == 1 and isinstance(parts[0], Content):
            return choice.text_chunk(parts[0].text)
        logprobs = b"null"
        if self._logprobs and piece.token_ids:
            logprobs = to_json({"content": self._logprobs.of(piece)})
        elif not (parts or piece.finish_reason or choice.shows_ids(piece)):
            return b""
        fields = (
            b'"delta":',
            self._fields.delta(parts),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            to_json(self._fields.finish_reason(piece) or None),
        )
        return choice.chunk(b"".join(fields), piece)

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._choice.take(piece)
        self._choice.add(piece)
        self._parts += self._fields.parts(piece)
        self._finish_reason = self._fields.finish_reason(piece)
        if self._logprobs:
            self._collected += self._logprobs.of(piece)

    def body(self) -> dict[str, Any]:
        """The whole choice."""
        choice = self._choice
        return {
            "index": choice.index,
            "message": self._fields.message(self._parts),
            "logprobs": {"content": self._collected} if self._logprobs else None,
            "finish_reason": self._finish_reason,
        } | choice.ids()

    def prompt_fields(self) -> dict[str, Any]:
        """What the whole answer shows of its prompt."""
        choice = self._choice
        return prompt_fields(choice.prompt, self._tokenizer) | choice.prompt_ids()
