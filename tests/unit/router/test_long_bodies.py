"""Bodies of millions of items: refused at the first thing that is wrong, before much is made of
them, as all streams of the router wait meanwhile."""

import pytest
from pydantic import ValidationError

from disagg.errors import RequestError
from disagg.messages.sampling import GRAMMAR_BYTES_MAX
from disagg.router.client_text import SHOWN_CHARS_MAX
from disagg.router.openai import body as bodies
from disagg.router.openai.body import ITEMS_MAX, OPENINGS_MAX, Strict
from disagg.router.openai.chat_request import ChatRequest, parse_chat
from disagg.router.openai.completion_request import CompletionRequest, parse_completion
from disagg.router.openai.responses_request import ResponsesRequest, parse_responses
from disagg.router.openai.sse import to_json
from disagg.router.openai.tokenize_request import DetokenizeRequest, TokenizeRequest, parse_tokenize
from tests.unit.router.test_http_errors import COMPLETION, check_error

MANY = 1000
KEYS = {f"a{number}": 1 for number in range(MANY)}
CALLER = {"role": "assistant", "tool_calls": [5] * MANY}


@pytest.mark.parametrize(
    ("kind", "fields", "num_errors"),
    [
        (ChatRequest, {"model": "tiny", "messages": [5] * MANY}, 1),
        (ChatRequest, {"model": "tiny", "messages": [{}] * MANY}, 1),
        (ChatRequest, {"model": "tiny", "messages": [CALLER]}, 1),
        (ChatRequest, {"model": "tiny", "messages": [{"role": "user"} | KEYS]}, 1),
        (CompletionRequest, {"model": "tiny", "prompt": "a"} | KEYS, 1),
        (CompletionRequest, {"model": "tiny", "prompt": "a", "logit_bias": KEYS | {"b": 1}}, 1),
        (ResponsesRequest, {"model": "tiny", "input": [{"type": "message"}] * MANY}, 2),
        (ResponsesRequest, {"model": "tiny", "input": "a", "metadata": KEYS}, 1),
        (TokenizeRequest, {"messages": [5] * MANY}, 1),
        (DetokenizeRequest, {"tokens": [""] * MANY}, 1),
    ],
)
def test_errors_are_not_collected(kind: type[Strict], fields: object, num_errors: int) -> None:
    """Of each pydantic makes an object, and of all of them a list: some microseconds each."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() <= num_errors


def test_one_of_many_unknown_fields_is_named() -> None:
    for body, param in (
        ({"model": "tiny", "messages": []} | KEYS, "a0"),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "b"} | KEYS]},
            "messages[0].a0",
        ),
    ):
        with pytest.raises(RequestError, match="unknown field") as caught:
            parse_chat(to_json(body))
        assert caught.value.param == param


LONG = {"n" * 100_000: 1}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (LONG, ""),
        ({"stream": True, "stream_options": LONG}, "stream_options."),
        ({"messages": [{"role": "user", "content": "b"} | LONG]}, "messages[0]."),
        ({"response_format": {"type": "json_object"} | LONG}, "response_format."),
    ],
)
def test_no_more_of_an_unknown_name_is_told_than_of_other_texts(fields, where) -> None:
    with pytest.raises(RequestError, match="unknown field") as caught:
        parse_chat(to_json({"model": "tiny", "messages": []} | fields))
    assert caught.value.param is not None
    assert caught.value.param.startswith(where + "n" * SHOWN_CHARS_MAX + "…")
    assert len(caught.value.param) < 2 * SHOWN_CHARS_MAX


def test_no_more_of_a_key_is_told_either() -> None:
    bias = {"logit_bias": {"n" * 100_000: 1}}
    with pytest.raises(RequestError) as caught:
        parse_chat(to_json({"model": "tiny", "messages": []} | bias))
    assert len(str(caught.value)) < 4 * SHOWN_CHARS_MAX


@pytest.mark.parametrize(
    ("parse", "field", "item"),
    [
        (parse_completion, "prompt", "a"),
        (parse_chat, "messages", {"role": "user", "content": ""}),
        (parse_responses, "input", {"role": "user", "content": ""}),
    ],
)
def test_so_many_items_are_taken_and_no_more(parse, field, item) -> None:
    parse(to_json({"model": "tiny", field: [item] * ITEMS_MAX}))
    with pytest.raises(RequestError, match=f"at most {ITEMS_MAX}") as caught:
        parse(to_json({"model": "tiny", field: [item] * (ITEMS_MAX + 1)}))
    assert caught.value.param == field


def tool(schema: object) -> dict[str, object]:
    return {"name": "f", "parameters": {"enum": schema}}


def asked(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "a"}]} | fields


def said(arguments: object) -> dict[str, object]:
    call = {"id": "a", "function": {"name": "f", "arguments": to_json(arguments).decode()}}
    return asked(messages=[{"role": "assistant", "tool_calls": [call]}])


def formed(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": schema}}}


def responses(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "input": "a"} | fields


def called(arguments: object) -> dict[str, object]:
    text = to_json(arguments).decode()
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
    return responses(input=[item])


SCHEMA = {"enum": [1] * GRAMMAR_BYTES_MAX}
TOO_MANY = [1] * ITEMS_MAX
TEXT_FORMAT = {"type": "json_schema", "name": "f", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_chat, asked(tools=[{"type": "function", "function": tool(TOO_MANY)}]), "tools"),
        (parse_tokenize, asked(tools=[{"type": "function", "function": tool(TOO_MANY)}]), "tools"),
        (parse_responses, responses(tools=[{"type": "function"} | tool(TOO_MANY)]), "tools"),
        (parse_chat, said({"a": TOO_MANY}), "messages"),
        (parse_tokenize, said({"a": TOO_MANY}), "messages"),
        (parse_responses, called({"a": TOO_MANY}), "input"),
        (
            parse_completion,
            {"model": "tiny", "prompt": "a", "response_format": formed(SCHEMA["enum"])},
            "response_format.json_schema.schema",
        ),
        (
            parse_chat,
            asked(response_format=formed(["a" * GRAMMAR_BYTES_MAX])),
            "response_format.json_schema.schema",
        ),
        (
            parse_chat,
            asked(response_format=formed([{"a" * GRAMMAR_BYTES_MAX: 1}])),
            "response_format.json_schema.schema",
        ),
        (parse_responses, responses(text={"format": TEXT_FORMAT}), "text.format.schema"),
    ],
)
def test_what_has_too_many_values_is_refused_where_it_is_read(parse, body, param) -> None:
    """Before anything is made of it: it is written out where all streams wait."""
    with pytest.raises(RequestError, match="at most") as caught:
        parse(to_json(body))
    assert caught.value.param == param


def test_schemas_and_calls_of_usual_sizes_are_taken() -> None:
    many = [1] * (ITEMS_MAX - 10)
    parse_chat(to_json(asked(tools=[{"type": "function", "function": tool(many)}])))
    parse_chat(to_json(said({"a": many})))
    parse_chat(to_json(asked(response_format=formed(["a" * (GRAMMAR_BYTES_MAX - 100)]))))


def test_openings_of_lists_and_maps_are_counted_before_they_are_made(monkeypatch) -> None:
    parse_chat(b'{"model": "tiny", "messages": [{"role": "user", "content": "[{["}]}')

    def made(*_: object, **__: object) -> None:
        raise AssertionError("lists")

    monkeypatch.setattr(bodies, "from_json", made)
    for opening in (b"[", b"{"):
        with pytest.raises(RequestError, match=r"\[ and \{"):
            parse_chat(opening * (OPENINGS_MAX + 1))


async def test_of_too_many_prompts_no_requests_are_made(house, monkeypatch) -> None:
    def made(self: CompletionRequest) -> None:
        raise AssertionError("for each prompt")

    monkeypatch.setattr(CompletionRequest, "generation_requests", made)
    answer = await house.http.post("/v1/completions", json=COMPLETION | {"prompt": ["a"] * 257})
    check_error(answer, 400, "prompt", "invalid_value")
