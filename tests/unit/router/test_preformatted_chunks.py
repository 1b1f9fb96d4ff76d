"""Chunks made around a text say what an encoder of the whole chunk says, byte for byte."""

import json
from typing import Any
from unittest.mock import sentinel

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.message_parts.parts import Content, Reasoning
from disagg.router.openai import answer as answer_module
from disagg.router.openai.answer import Answer, Format
from disagg.router.openai.answer_form import AnswerForm
from disagg.router.openai.chat_format import ChatFormat
from disagg.router.openai.completion_format import CompletionFormat
from disagg.router.openai.message_fields import MessageFields
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.text_stream import Piece

CREATED = 1_700_000_000
PROMPT = (1, 2, 3)
NAMES = st.text(min_size=1, max_size=8)
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", '"', "\\", "\0", "\x1f\x7f", "\n\r\t", "\u2028\u2029", "é", "\U0001f600", "</script>"]
)
SURROGATES = st.text(st.characters(categories=["Cs"]), max_size=1)
"""JSON has an escape for them."""
PIECES = st.lists(
    st.builds(
        Piece,
        TEXTS | SURROGATES,
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.just(()),
        st.just(""),
    ),
    max_size=6,
)
FINISHES = st.sampled_from(["stop", "length"])
FORMS = st.builds(
    AnswerForm,
    with_token_ids=st.booleans(),
    with_usage_field=st.booleans(),
    with_running_usage=st.booleans(),
)
KINDS = ("chat", "completion", "chat of parts")


class EveryThird:
    """Parses a text so that each kind of part comes, and several at a time."""

    def __init__(self) -> None:
        self._num = 0

    def push(self, text: str) -> list[Content | Reasoning]:
        self._num += 1
        if self._num % 3 == 1:
            return [Content(text)] if text else []
        return [Reasoning(text), Content(text)] if self._num % 3 else [Reasoning(text)]

    def finish(self) -> list[Content | Reasoning]:
        return []


def made(kind: str, name: str, model: str, form: AnswerForm) -> Format:
    prompts = [ShownPrompt(PROMPT)]
    answer = Answer(name, CREATED, model, sentinel.tokenizer, prompts, form)
    if kind == "completion":
        return CompletionFormat(answer)
    parser: Any = EveryThird() if kind == "chat of parts" else None
    return ChatFormat(answer, [MessageFields(parser, name)])


def expected(kind: str, name: str, model: str, form: AnswerForm, pieces: list[Piece]) -> bytes:
    """Every chunk as one object for the encoder of the standard library."""
    chunks = b""
    num_tokens = 0
    parser = EveryThird()
    for number, piece in enumerate(pieces):
        num_tokens += len(piece.token_ids)
        chunk: dict[str, Any] = {"id": name, "object": "chat.completion.chunk", "created": CREATED}
        chunk["model"] = model
        choice: dict[str, Any] = {"index": 0}
        if kind == "completion":
            chunk["object"] = "text_completion"
            choice["text"] = piece.text
            is_shown = bool(piece.text)
        else:
            delta: dict[str, str] = {}
            parts: list[Content | Reasoning] = [Content(piece.text)] if piece.text else []
            if kind == "chat of parts":
                parts = parser.push(piece.text)
            for part in parts:
                field = "content" if isinstance(part, Content) else "reasoning_content"
                delta[field] = part.text
            choice["delta"] = delta
            is_shown = bool(delta)
        choice |= {"logprobs": None, "finish_reason": piece.finish_reason or None}
        if form.with_token_ids:
            if kind == "completion" and not number:
                choice["prompt_token_ids"] = PROMPT
                is_shown = True
            choice["token_ids"] = piece.token_ids
            is_shown |= bool(piece.token_ids)
        chunk["choices"] = [choice]
        if form.with_running_usage:
            total = len(PROMPT) + num_tokens
            chunk["usage"] = {
                "prompt_tokens": len(PROMPT),
                "completion_tokens": num_tokens,
                "total_tokens": total,
            }
        elif form.with_usage_field:
            chunk["usage"] = None
        if is_shown or piece.finish_reason:
            chunks += b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode()
    return chunks


def shown(kind: str, name: str, model: str, form: AnswerForm, pieces: list[Piece]) -> bytes:
    fmt = made(kind, name, model, form)
    return b"".join(fmt.chunk(0, piece) for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(name=NAMES, model=NAMES, form=FORMS, pieces=PIECES, last=TEXTS, finish=FINISHES)
def test_a_chunk_is_what_the_whole_encoder_makes(
    kind: str,
    name: str,
    model: str,
    form: AnswerForm,
    pieces: list[Piece],
    last: str,
    finish: str,
) -> None:
    pieces = [*pieces, Piece(last, (7,), (), finish)]
    given_all = (kind, name, model, form, pieces)
    assert shown(*given_all) == expected(*given_all)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_control_a_text_that_is_not_escaped_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [Piece(text, (1,), (), "") for text in ("begin", 'say "hi"')]
    given_all = (kind, "x", "m", AnswerForm(), pieces)
    assert shown(*given_all) == expected(*given_all)
    monkeypatch.setattr(answer_module, "text_to_json", lambda text: f'"{text}"'.encode())
    assert shown(*given_all) != expected(*given_all)
