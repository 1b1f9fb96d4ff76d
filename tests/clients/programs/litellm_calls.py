"""LiteLLM as its users write it; prints what came as JSON."""

import json
import sys
from typing import Any

import litellm

litellm.num_retries = 0


def main(given: dict[str, Any]) -> dict[str, Any]:
    access = {"api_base": given["url"], "api_key": given["key"]}
    found: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm"):
        chat: Any = access | {
            "model": f"{provider}/{given['model']}",
            "messages": given["messages"],
            "max_tokens": 12,
            "temperature": 0,
        }
        forced = {"type": "function", "function": {"name": given["tools"][0]["function"]["name"]}}
        calls = chat | {"tools": given["tools"], "tool_choice": forced, "max_tokens": 200}
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": given["schema"]}}
        penalties = {"frequency_penalty": 1.5, "presence_penalty": 1}
        found[provider] = {
            "chat": text(litellm.completion(**chat)),
            "stream": "".join(
                part.choices[0].delta.content or ""
                for part in litellm.completion(**chat, stream=True)
            ),
            "two": [one.message.content for one in litellm.completion(**chat, n=2).choices],
            "penalties": text(litellm.completion(**chat, **penalties)),
            "call": litellm.completion(**calls).choices[0].message.tool_calls[0].function.arguments,
            "shaped": text(
                litellm.completion(**chat | {"max_tokens": 200, "response_format": shape})
            ),
        }
    complete: Any = access | {
        "model": f"text-completion-openai/{given['model']}",
        "max_tokens": 12,
        "temperature": 0,
    }
    one = litellm.text_completion(prompt=given["prompt"], **complete)
    found["completion"] = one.choices[0].text
    two = litellm.text_completion(prompt=[given["prompt"], given["prompt"][5:]], **complete)
    found["two_prompts"] = [choice.text for choice in two.choices]
    return found


def text(answer: Any) -> str:
    content: str = answer.choices[0].message.content
    return content


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
