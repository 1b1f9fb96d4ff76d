"""Forced calls of tools end to end: handed over, streamed, going on where a worker was killed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, handed_over
from tests.process.test_grammars import ANSWER_S, SAMPLINGS, is_at

pytestmark = pytest.mark.timeout(600)

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ tools | map(attribute='function') | list | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 12, "maxLength": 16},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: Any = [{"role": "user", "content": "Rain? " + "the cat sat on the mat " * 8}]
NUM_BEFORE = 60
"""Tokens that a client has when its decode worker is killed: it is in the arguments by then."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tools")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    cluster = Cluster(directory, folder, {"max_step_tokens": 96})
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        yield ServedModel(cluster)


@pytest.fixture
def served(started: ServedModel) -> Iterator[ServedModel]:
    started.restore()
    yield started
    started.settle()


class Streamed:
    """The one call of a streamed answer, joined."""

    def __init__(self, served: ServedModel, request_id: str, **more: Any) -> None:
        given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "tools": TOOLS} | more
        stream = served.cluster.client.chat.completions.create(
            **given, stream=True, extra_headers={"X-Request-Id": request_id}
        )
        choices = [chunk.choices[0] for chunk in stream]
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        self.finish_reason = choices[-1].finish_reason
        self.content = "".join(choice.delta.content or "" for choice in choices)
        self.ids = [call.id for call in calls if call.id]
        self.names = [call.function.name for call in calls if call.function.name]
        self.fragments = [call.function.arguments or "" for call in calls]

    @property
    def arguments(self) -> str:
        return "".join(self.fragments)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_forced_call_follows_its_schema(served: ServedModel, sampling: dict[str, Any]) -> None:
    name = served.new_id()
    call = Streamed(served, name, tool_choice=WEATHER, **sampling)
    assert (call.names, call.content, call.finish_reason) == (["get_weather"], "", "tool_calls")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert len(call.fragments) > 3
    handed_over(served.cluster.record(name) | {"outcome": "length"})  # it ended by a stop token
    # Control: without it the model writes something else.
    free = Streamed(served, served.new_id(), tool_choice="auto", **sampling)
    assert free.names == []
    assert free.finish_reason == "length"


def test_required_calls_some_tool(served: ServedModel) -> None:
    call = Streamed(
        served, served.new_id(), tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (name,) = call.names
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, SCHEMA if name == "get_weather" else {"maxProperties": 0})


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_call_goes_on_where_its_worker_was_killed(
    served: ServedModel, sampling: dict[str, Any]
) -> None:
    """Its arguments are those that it would have had, under one id."""
    cluster = served.cluster
    given = {"tool_choice": WEATHER} | sampling
    expected = Streamed(served, served.new_id(), **given)
    served.settle()
    served.restore()
    decode = ["d0", "d1"]
    for worker in decode:
        cluster.tell(worker, "hold steps")
        cluster.tell(worker, f"pass steps {NUM_BEFORE - 1}")
    name = served.new_id()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(Streamed, served, name, **given)
        wait_until(lambda: is_at(cluster, name, NUM_BEFORE), f"{NUM_BEFORE} tokens")
        (first,) = cluster.record(name)["generations"]
        killed = first["decode"]["worker_id"]
        assert killed in decode
        cluster.workers[killed].kill()
        for other in cluster.living():
            cluster.tell(other, "pass steps")
        found = answer.result(ANSWER_S)
    assert found.arguments == expected.arguments
    assert found.finish_reason == "tool_calls"
    assert len(found.ids) == 1
    assert found.ids != expected.ids  # another request's
    first, second = cluster.record(name)["generations"]
    assert first["cause"].startswith("worker_lost")
    assert second["decode"]["worker_id"] != killed
