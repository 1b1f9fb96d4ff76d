"""Tools, reasoning and template variables over HTTP; the tokens of the worker are known."""

import json
import shutil
from typing import Any

import openai
import pytest

from disagg.router.chat import Chat
from disagg.router.openai.message_fields import call_id
from disagg.router.tokenizer import Tokenizer
from tests.unit.router.message_examples import ASK, BODY, CALL, TOOLS
from tests.unit.router.test_http_errors import check_error


def client_of(house):
    return openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0)


async def test_a_call_whole_and_streamed(serve):
    house = await serve(f"So.\n{CALL}")
    async with client_of(house) as client:
        completion = await client.chat.completions.create(**BODY, max_tokens=200)
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "So.\n"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.type) == ("get_weather", "function")
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert call.id == call_id(completion.id, 0)
        stream = await client.chat.completions.create(**BODY, max_tokens=200, stream=True)
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(delta.content or "" for delta in deltas) == "So.\n"
    assert "".join(call.function.arguments for call in calls) == '{"city": "Paris"}'
    assert len(calls) > 3  # in pieces
    assert [call.id for call in calls if call.id] == [call_id(chunks[0].id, 0)]
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    assert {call.index for call in calls} == {0}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "stop", "reason", "arguments"),
    [
        (CALL, "}", "stop", '{"city": "Paris"'),
        (CALL, "ris", "stop", '{"city": "Pa'),
        (f"{CALL}\n{CALL}", '"}', "stop", '{"city": "Paris'),
        (CALL, "</tool", "tool_calls", '{"city": "Paris"}'),
    ],
)
async def test_a_stop_string_in_a_call(serve, text, stop, reason, arguments):
    """Who gets `tool_calls` reads the arguments as JSON."""
    house = await serve(text)
    async with client_of(house) as client:
        body = BODY | {"max_tokens": 200, "stop": stop}
        (choice,) = (await client.chat.completions.create(**body)).choices
        stream = await client.chat.completions.create(**body, stream=True)
        chunks = [chunk async for chunk in stream]
    assert choice.message.tool_calls[-1].function.arguments == arguments
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == reason


async def test_without_tools_the_same_text_is_content(serve):
    house = await serve(CALL, Chat(tuple(ASK)))
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        body = {"model": "tiny", "messages": ASK, "max_tokens": 200} | more
        answer = await house.http.post("/v1/chat/completions", json=body)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": CALL}


async def test_calls_of_parallel_and_not(serve):
    house = await serve(f"{CALL}\n{CALL}")
    for more, num in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        body = BODY | {"max_tokens": 300} | more
        answer = await house.http.post("/v1/chat/completions", json=body)
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] is None
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == num


async def test_reasoning(serve):
    house = await serve("Hm.\n</think>\n\nYes.", Chat(tuple(ASK), template_kwargs={"thinking": 1}))
    body = {"model": "tiny", "messages": ASK, "chat_template_kwargs": {"thinking": True}}
    answer = await house.http.post("/v1/chat/completions", json=body | {"max_tokens": 100})
    message = answer.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    async with house.http.stream(
        "POST", "/v1/chat/completions", json=body | {"max_tokens": 100, "stream": True}
    ) as stream:
        lines = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


async def test_reasoning_parser_none(serve):
    chat = Chat(tuple(ASK), template_kwargs={"thinking": 1})
    house = await serve("Hm.</think>Yes.", chat, reasoning_parser="none")
    body = {"model": "tiny", "messages": ASK, "chat_template_kwargs": {"thinking": True}}
    answer = await house.http.post("/v1/chat/completions", json=body | {"max_tokens": 100})
    assert answer.json()["choices"][0]["message"]["content"] == "Hm.</think>Yes."


async def test_messages_of_tools_reach_the_template(serve, chat_tokenizer):
    house = await serve("x")
    messages: Any = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    body = {"model": "tiny", "messages": messages}
    await house.http.post("/v1/chat/completions", json=body | {"max_tokens": 1})
    (submit,) = house.workers[0].submits
    expected = (
        "<bos><|user|>hi<|end|><|assistant|><think>Hm.</think>"
        '[c1:get_weather:{"city": "Paris"}]<|end|><|tool|>rain=c1<|end|><|assistant|>'
    )
    assert chat_tokenizer.decode_all(submit.token_ids) == expected
    answer = await house.http.post("/tokenize", json=body | {"return_token_strs": True})
    assert answer.json()["tokens"] == list(submit.token_ids)
    assert "".join(answer.json()["token_strs"]) == expected
    # The same conversation as items.
    items: Any = [
        {"role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": '{"city": "Paris"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    body = {"model": "tiny", "input": items, "max_output_tokens": 1}
    answer = await house.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert house.workers[0].submits[-1].token_ids == submit.token_ids


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 2}, "tools[2].function.name"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "objet"}}}
                ],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
        ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs.no_such"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_bad_tools_are_refused_by_name(serve, change, param):
    house = await serve("x")
    answer = await house.http.post("/v1/chat/completions", json=BODY | change)
    check_error(answer, 400, param, "invalid_value")
    assert house.workers[0].submits == []


async def test_a_template_without_tools_and_a_family_without_format(open_house, serve):
    plain = await open_house()
    await plain.add()
    answer = await plain.http.post("/v1/chat/completions", json=BODY)
    check_error(answer, 400, "tools", "invalid_value")
    assert "chat template has no tools" in answer.json()["error"]["message"]
    unknown = await serve("x", tool_call_parser="none")
    answer = await unknown.http.post("/v1/chat/completions", json=BODY)
    check_error(answer, 400, "tools", "invalid_value")
    assert "model.tool_call_parser" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ m.tool_calls[0].function.arguments | tojson }}",
        "{{ '' + m.tool_calls[0]['function']['arguments'] + '' }}",
        "{{- '```' + m.tool_calls[0]['function']['arguments'] -}}",
        "{{ '{' }}{% for k, v in m.tool_calls[0].function.arguments | items %}"
        '"{{ k }}": "{{ v }}"{% endfor %}{{ "}" }}',
    ],
)
def test_arguments_are_what_the_template_takes(chat_checkpoint, tmp_path, template):
    file = tmp_path / "template.jinja"
    loop = "{% for m in messages if m.tool_calls %}", "{% endfor %}"
    file.write_text(loop[0] + template + loop[1])
    tokenizer = Tokenizer(chat_checkpoint, chat_template=str(file))
    function = {"name": "f", "arguments": {"a": "b"}}
    call = {"id": "1", "type": "function", "function": function}
    chat = Chat(({"role": "assistant", "content": None, "tool_calls": [call]},))
    assert '{"a": "b"}' in tokenizer.decode_all(tokenizer.encode_chat(chat))


async def test_gemma_has_a_template_with_tools(open_house, model_dir, tmp_path):
    path = shutil.copytree(model_dir, tmp_path / "gemma")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    tokenizer = Tokenizer(path)
    with_tools = Chat((*ASK, {"role": "tool", "tool_call_id": "1", "content": "x"}), tuple(TOOLS))
    text = tokenizer.decode_all(tokenizer.encode_chat(with_tools))
    assert '"name": "get_weather"' in text
    assert text.endswith("```tool_output\nx\n```<end_of_turn>\n<start_of_turn>model\n")
    # Without tools it is the checkpoint's own.
    assert tokenizer.decode_all(tokenizer.encode_chat(Chat(tuple(ASK)))).endswith("<|assistant|>")


async def test_a_forced_call_is_a_grammar(serve):
    house = await serve("x")
    grammars = {}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "time.now"}}):
        body = BODY | {"tool_choice": choice, "max_tokens": 1}
        answer = await house.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        grammars[str(choice)[:5]] = house.workers[0].submits[-1].sampling.grammar
    assert grammars["auto"] == ""
    assert "get_weather" in grammars["requi"]
    assert "get_weather" not in grammars["{'typ"]
    assert "time.now" in grammars["{'typ"]


@pytest.mark.parametrize(
    "text", [r'{"a":"\ud83d"}', r'{"\udc00":1}', '{"a":NaN}', '{"a":' * 300 + "1" + "}" * 300]
)
async def test_arguments_that_no_prompt_can_have_are_refused_by_name(serve, text):
    """JSON can name half a surrogate pair; UTF-8 cannot hold it."""
    house = await serve("x")
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    change = {"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}
    answer = await house.http.post("/v1/chat/completions", json=BODY | change)
    check_error(answer, 400, "messages[1].tool_calls[0].function.arguments", "invalid_value")
