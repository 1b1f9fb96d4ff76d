"""`/v1/responses` with OpenAI's client; the tokens of the worker are known."""

import json

import pytest
from openai.types.responses import ResponseCompletedEvent

from disagg.router.openai.message_fields import call_id
from tests.unit.router.message_examples import CALL, TOOLS
from tests.unit.router.test_tools import client_of

FLAT_TOOLS = [{"type": "function"} | tool["function"] for tool in TOOLS]
RESPONSE = {"model": "tiny", "input": "hi", "tools": FLAT_TOOLS, "max_output_tokens": 200}


async def test_responses(serve):
    house = await serve(f"<think>Hm.</think>So.{CALL}")
    async with client_of(house) as client:
        response = await client.responses.create(**RESPONSE, store=False)
        assert response.status == "completed"
        thought, said, call = response.output
        assert thought.content[0].text == "Hm."
        assert response.output_text == said.content[0].text == "So."
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        assert call.call_id == call_id(response.id, 0)
        assert response.store is False
        assert response.usage.output_tokens > response.usage.output_tokens_details.reasoning_tokens
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        stream = await client.responses.create(**RESPONSE, stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    kept = ("type", "name", "arguments", "status")
    shape = [{name: getattr(item, name, None) for name in kept} for item in last.response.output]
    assert shape == [{name: getattr(i, name, None) for name in kept} for i in response.output]
    deltas = {
        kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert deltas == {
        "reasoning_text": "Hm.",
        "output_text": "So.",
        "function_call_arguments": '{"city": "Paris"}',
    }
    # Every item that is added is done before the next.
    order = [e.type.rpartition(".")[2] for e in events if ".output_item." in e.type]
    assert order == ["added", "done"] * 3


async def test_responses_that_are_cut(serve):
    house = await serve("So long.")
    body = RESPONSE | {"max_output_tokens": 2}
    answer = (await house.http.post("/v1/responses", json=body)).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


async def test_responses_with_a_schema(serve):
    house = await serve("x", reasoning_parser="none")
    schema = {"type": "object", "properties": {"weather": {"type": "string"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    body = {"model": "tiny", "input": "hi", "text": text, "max_output_tokens": 1}
    answer = await house.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "weather" in house.workers[0].submits[-1].sampling.grammar
    assert answer.json()["text"]["format"]["schema"] == schema


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"no_such": 1}, "no_such"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "x"}]},
            "input[0].arguments",
        ),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.function.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_bad_responses_requests_are_refused_by_name(serve, change, param):
    house = await serve("x")
    answer = await house.http.post("/v1/responses", json=RESPONSE | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert house.workers[0].submits == []
