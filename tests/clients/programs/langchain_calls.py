"""LangChain's OpenAI classes as their users write it; prints what came as JSON."""

import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


def main(given: dict[str, Any]) -> dict[str, Any]:
    access: Any = {"base_url": given["url"], "api_key": given["key"], "max_retries": 0}
    chat = ChatOpenAI(model=given["model"], temperature=0, max_tokens=12, **access)
    long = ChatOpenAI(model=given["model"], temperature=0, max_tokens=200, **access)
    asked = [HumanMessage(given["messages"][0]["content"])]
    found: dict[str, Any] = {"invoke": chat.invoke(asked).content}
    found["stream"] = "".join(str(part.content) for part in chat.stream(asked))
    found["batch"] = [answer.content for answer in chat.batch([asked, asked])]
    found["usage"] = chat.invoke(asked).usage_metadata
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(asked)
    found["logprobs"] = [one["token"] for one in logprobs.response_metadata["logprobs"]["content"]]
    found["penalties"] = chat.bind(frequency_penalty=1.5, presence_penalty=1).invoke(asked).content

    name = given["tools"][0]["function"]["name"]
    with_tools = long.bind_tools(given["tools"], tool_choice=name)
    called = with_tools.invoke(asked)
    found["tool_calls"] = called.tool_calls
    streamed: Any = None
    for part in with_tools.stream(asked):
        streamed = part if streamed is None else streamed + part
    found["tool_calls_streamed"] = streamed.tool_calls
    turns = [*asked, called, ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])]
    found["after_the_tool"] = chat.invoke(turns).content
    found["history"] = chat.invoke([*asked, AIMessage("Yes."), HumanMessage("Why?")]).content
    schema = {"title": "thing"} | given["schema"]
    for method in ("json_schema", "function_calling"):
        shaped = long.with_structured_output(schema, method=method)
        found[method] = shaped.invoke(asked)

    complete = OpenAI(model=given["model"], temperature=0, max_tokens=12, **access)
    found["completion"] = complete.invoke(given["prompt"])
    found["completion_stream"] = "".join(complete.stream(given["prompt"]))
    two = complete.generate([given["prompt"], given["prompt"][5:]])
    found["two_prompts"] = [generations[0].text for generations in two.generations]
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
