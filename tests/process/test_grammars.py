"""`response_format` end to end: handed over, streamed, and going on where a worker was killed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, handed_over

pytestmark = pytest.mark.timeout(600)

ANSWER_S = 60
NUM_BEFORE = 8
"""Tokens that a client has when its decode worker is killed."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 16},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["round", "square"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}
MESSAGES: Any = [{"role": "user", "content": "What is it? " + "the cat sat on the mat " * 8}]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95, "seed": 11}]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("grammars")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(directory, folder, {"max_step_tokens": 96})
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        yield ServedModel(cluster)


@pytest.fixture
def served(started: ServedModel) -> Iterator[ServedModel]:
    started.restore()
    yield started
    started.settle()


def ask(served: ServedModel, request_id: str, **more: Any) -> Any:
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100} | more
    headers = {"X-Request-Id": request_id}
    return served.cluster.client.chat.completions.create(**given, extra_headers=headers)


def text_of(completion: Any) -> str:
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    text: str = choice.message.content
    return text


def is_instance(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_is_an_instance_of_its_schema(
    served: ServedModel, sampling: dict[str, Any]
) -> None:
    name = served.new_id()
    text = text_of(ask(served, name, response_format=FORMAT, **sampling))
    assert is_instance(text), text
    record = served.cluster.record(name) | {"outcome": "length"}  # it ended by a stop token
    handed_over(record)
    stream = ask(served, served.new_id(), response_format=FORMAT, stream=True, **sampling)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    # Control: without it the model writes something else.
    plain = ask(served, served.new_id(), **sampling)
    assert not is_instance(plain.choices[0].message.content)


def test_completions_and_any_object(served: ServedModel) -> None:
    """A model that knows nothing seldom closes what it opens: what there is begins an object."""
    for response_format in (FORMAT, {"type": "json_object"}):
        completion = served.cluster.client.completions.create(
            model=MODEL,
            prompt=list(range(10, 60)),
            max_tokens=100,
            temperature=0,
            extra_body={"response_format": response_format},
        )
        (choice,) = completion.choices
        assert choice.text.startswith("{")
        assert response_format is not FORMAT or is_instance(choice.text)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_goes_on_where_its_worker_was_killed(
    served: ServedModel, sampling: dict[str, Any]
) -> None:
    """The tokens are those that it would have had."""
    cluster = served.cluster
    expected = text_of(ask(served, served.new_id(), response_format=FORMAT, **sampling))
    served.settle()
    served.restore()
    decode = ["d0", "d1"]
    for name in decode:
        cluster.tell(name, "hold steps")
        cluster.tell(name, f"pass steps {NUM_BEFORE - 1}")
    name = served.new_id()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, served, name, response_format=FORMAT, **sampling)
        wait_until(lambda: is_at(cluster, name, NUM_BEFORE), f"{NUM_BEFORE} tokens")
        (first,) = cluster.record(name)["generations"]
        killed = first["decode"]["worker_id"]
        assert killed in decode
        cluster.workers[killed].kill()
        for other in cluster.living():
            cluster.tell(other, "pass steps")
        assert text_of(answer.result(ANSWER_S)) == expected
    first, second = cluster.record(name)["generations"]
    assert first["cause"].startswith("worker_lost")
    assert first["num_tokens"] == NUM_BEFORE
    assert second["decode"]["worker_id"] != killed
    assert is_instance(expected)


def is_at(cluster: Cluster, request_id: str, num_tokens: int) -> bool:
    answer = cluster.admin.get(f"/v1/disagg/requests/{request_id}")
    return answer.status_code == 200 and answer.json()["num_tokens"] == num_tokens


def test_a_schema_that_is_no_grammar_reaches_no_worker(served: ServedModel) -> None:
    before = {name: served.cluster.counts(name) for name in served.cluster.workers}
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(served, served.new_id(), response_format=bad)
    body: Any = error.value.body
    assert body["param"] == "response_format"
    assert "Unimplemented" in body["message"]
    assert {name: served.cluster.counts(name) for name in served.cluster.workers} == before
