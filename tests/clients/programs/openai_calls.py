"""OpenAI's client as its users write it; run in its own environment, prints what came as JSON."""

import json
import sys
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel, Field


class Thing(BaseModel):
    """What the model has to describe."""

    name: str = Field(min_length=4, max_length=6, pattern="^[a-z]+$")
    size: int = Field(ge=0, le=99)


def main(given: dict[str, Any]) -> dict[str, Any]:
    client = OpenAI(base_url=given["url"], api_key=given["key"], max_retries=0, timeout=300)
    model = client.models.list().data[0].id
    completion = {"model": model, "prompt": given["prompt"], "max_tokens": 12, "temperature": 0}
    chat: Any = {"model": model, "messages": given["messages"], "max_tokens": 12, "temperature": 0}
    found: dict[str, Any] = {"model": model}

    answer = client.completions.create(**completion, logprobs=2)
    found["completion"] = answer.model_dump()
    parts = client.completions.create(
        **completion, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk.model_dump() for chunk in parts]
    found["completion_stream"] = chunks
    found["two_prompts"] = client.completions.create(
        **completion | {"prompt": [given["prompt"], given["prompt"][5:]]}
    ).model_dump()
    found["token_ids"] = client.completions.create(
        **completion | {"prompt": given["token_ids"]}
    ).model_dump()
    found["echo"] = client.completions.create(
        **completion | {"max_tokens": 1}, echo=True, logprobs=1
    ).model_dump()
    sampled = completion | {"temperature": 1, "seed": 7}
    found["two_choices"] = client.completions.create(**sampled, n=2).model_dump()
    found["two_choices_again"] = client.completions.create(**sampled, n=2, best_of=2).model_dump()
    found["penalties"] = client.completions.create(
        **completion, frequency_penalty=1.5, presence_penalty=1, logit_bias={"40": 5}
    ).model_dump()

    found["chat"] = client.chat.completions.create(
        **chat, logprobs=True, top_logprobs=3
    ).model_dump()
    found["chat_stream"] = [
        chunk.model_dump() for chunk in client.chat.completions.create(**chat, stream=True)
    ]
    found["chat_two"] = client.chat.completions.create(**chat, n=2).model_dump()
    forced: Any = {"type": "function", "function": {"name": given["tools"][0]["function"]["name"]}}
    calls = chat | {"tools": given["tools"], "tool_choice": forced, "max_tokens": 200}
    called = client.chat.completions.create(**calls)
    found["tool_call"] = called.model_dump()
    with client.chat.completions.stream(**calls) as stream:
        found["tool_call_streamed"] = stream.get_final_completion().model_dump()
    message: Any = called.choices[0].message
    turns = [*given["messages"], message, tool_result(message)]
    found["after_the_tool"] = client.chat.completions.create(
        **chat | {"messages": turns}, tools=given["tools"], tool_choice="none"
    ).model_dump()
    parsed = client.chat.completions.parse(
        **chat | {"max_tokens": 200}, response_format=Thing
    ).choices[0]
    found["parsed"] = parsed.message.parsed.model_dump() if parsed.message.parsed else None
    loose = client.chat.completions.create(
        **chat | {"max_tokens": 300}, seed=3, response_format={"type": "json_object"}
    )
    found["json_object"] = loose.model_dump()
    response = client.responses.create(
        model=model, input="Say something.", max_output_tokens=16, temperature=0
    )
    found["response"] = response.output_text

    found["refused"] = {
        "key": refusal(openai.AuthenticationError, given, api_key="sk-wrong"),
        "embeddings": status(lambda: client.embeddings.create(model=model, input="x")),
        "model": status(lambda: client.completions.create(model="other", prompt="x")),
    }
    return found


def tool_result(message: Any) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}


def refusal(kind: type[openai.APIStatusError], given: dict[str, Any], api_key: str) -> str:
    try:
        OpenAI(base_url=given["url"], api_key=api_key, max_retries=0).models.list()
    except kind as error:
        return type(error).__name__
    return "served"


def status(call: Any) -> int:
    try:
        call()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
