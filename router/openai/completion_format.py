"""The answers of the completions endpoint."""

import math
from typing import Any

from disagg.errors import DisaggError
from disagg.messages.lazy import cached_property
from disagg.router.openai.answer import Answer, Choice
from disagg.router.openai.errors import error_body
from disagg.router.openai.logprobs import CompletionLogprobs, prompt_fields
from disagg.router.openai.sse import DONE, sse, to_json
from disagg.router.text_stream import Piece

TEXT_TAIL = b',"logprobs":null,"finish_reason":null'


class CompletionFormat:
    """Bodies and chunks of ``text_completion``.

    Where fewer choices are shown than there are, a body has those with the best mean logprob.
    """

    kind = "text_completion"

    done = DONE

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [CompletionChoice(answer, index) for index in range(len(answer))]

    def first_chunk(self) -> bytes:
        """Completions begin with their first text."""
        return b""

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        return self._choices[index].chunk(piece)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""
        return sse(self._answer.frame(self.kind) | {"choices": [], "usage": usage})

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last chunk of a stream that is not complete."""
        return sse(error_body(error))

    def add(self, index: int, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._choices[index].add(piece)

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        num_each, num_shown = self._answer.form.num_each, self._answer.form.num_shown
        shown: list[CompletionChoice] = []
        for first in range(0, len(self._choices), num_each):
            of_prompt = self._choices[first : first + num_each]
            if num_shown < num_each:
                of_prompt = sorted(of_prompt, key=lambda choice: -choice.mean_logprob)
            shown += of_prompt[:num_shown]
        choices = [choice.body() | {"index": index} for index, choice in enumerate(shown)]
        return self._answer.frame(self.kind) | {"choices": choices, "usage": usage}


class CompletionChoice:
    """One text that continues a prompt."""

    def __init__(self, answer: Answer, index: int) -> None:
        self._choice = Choice(answer, index, CompletionFormat.kind)
        self._tokenizer = answer.tokenizer
        self._logprobs = None
        self._texts: list[str] = []
        if answer.form.num_logprobs is not None:
            self._logprobs = CompletionLogprobs(
                answer.tokenizer, skip_special_tokens=answer.form.skip_special_tokens
            )
        self._collected: dict[str, list[Any]] | None = None
        self._sum_logprobs = 0.0
        self._has_begun = False

    @cached_property
    def _is_preformatted(self) -> bool:
        return self._choice.preformat(b'"text":', TEXT_TAIL)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; of none of them, the least there is."""
        num_tokens = self._choice.num_tokens
        return self._sum_logprobs / num_tokens if num_tokens else -math.inf

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""
        if self._is_preformatted and self._has_begun and not piece.finish_reason:  # the usual case
            self._choice.take(piece)
            return self._choice.text_chunk(piece.text) if piece.text else b""
        text, logprobs, is_first = self._next(piece)
        prompt_ids = self._choice.prompt_ids() if is_first else {}
        shows_more = logprobs is not None or prompt_ids or self._choice.shows_ids(piece)
        if not (text or piece.finish_reason or shows_more):
            return b""
        fields = [
            b'"text":',
            to_json(text),
            b',"logprobs":',
            b"null" if logprobs is None else to_json(logprobs),
            b',"finish_reason":',
            to_json(piece.finish_reason or None),
        ]
        if prompt_ids:
            fields += (b",", to_json(prompt_ids)[1:-1])
        return self._choice.chunk(b"".join(fields), piece)

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        text, logprobs, _ = self._next(piece)
        self._choice.add(piece)
        self._texts.append(text)
        self._sum_logprobs += sum(one.logprob for one in piece.logprobs)
        if logprobs is not None:
            if self._collected is None:
                self._collected = logprobs
            else:
                for name, values in logprobs.items():
                    self._collected[name] += values

    def body(self) -> dict[str, Any]:
        """The whole choice."""
        choice = self._choice
        return (
            {
                "index": choice.index,
                "text": "".join(self._texts),
                "logprobs": self._collected,
                "finish_reason": choice.finish_reason,
            }
            | prompt_fields(choice.prompt, self._tokenizer)
            | choice.prompt_ids()
            | choice.ids()
        )

    def _next(self, piece: Piece) -> tuple[str, dict[str, list[Any]] | None, bool]:
        """Text and logprobs of the next piece, behind the prompt's where that is to be shown.

        The third says whether it is the first piece.
        """
        choice, prompt = self._choice, self._choice.prompt
        choice.take(piece)
        is_first, self._has_begun = not self._has_begun, True
        echo = prompt.echo if is_first else None
        shown: dict[str, list[Any]] | None = None
        if echo is not None and self._logprobs:
            shown = self._logprobs.of_prompt(prompt, echo)
        if self._logprobs and piece.token_ids:
            own = self._logprobs.of(piece)
            shown = own if shown is None else {name: shown[name] + own[name] for name in shown}
        return (echo or "") + piece.text, shown, is_first
