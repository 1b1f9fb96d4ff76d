"""`response_format`: what a worker gets, and what no worker hears of."""

import json
import shutil

import pytest

from disagg.grammar.json_grammars import ANY_OBJECT, json_grammar
from disagg.messages.sampling import GRAMMAR_BYTES_MAX
from tests.unit.router.test_http_errors import check_error

COMPLETION = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
PATHS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def format_of(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema} | more}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "json_object"}, json_grammar(ANY_OBJECT)),
        (format_of(SCHEMA), json_grammar(SCHEMA)),
        (format_of(SCHEMA, strict=True, description="d"), json_grammar(SCHEMA)),
    ],
)
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_worker_gets_the_grammar(house, path, body, given, grammar):
    response = await house.http.post(path, json=body | {"response_format": given})
    assert response.status_code == 200, response.text
    (submit,) = house.workers[0].submits
    assert submit.sampling.grammar == grammar
    assert submit.sampling.num_prompt_tokens == len(submit.token_ids)
    assert submit.sampling.stop_token_ids == house.tokenizer.eos_token_ids
    assert "object" not in repr(submit)  # what users write stays out of logs


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"type": "xml"}, ".type", ""),
        ({}, ".type", "is required"),
        ({"type": "json_object", "strict": True}, ".strict", "unknown field"),
        (format_of({}) | {"type": "json_object"}, ".json_schema", "goes with type json_schema"),
        ({"type": "json_schema"}, ".json_schema", "is required"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, ".json_schema.schema", ""),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, ".json_schema.name", ""),
        (format_of({}, name="a b"), ".json_schema.name", ""),
        (format_of([]), ".json_schema.schema", ""),
        (format_of({"type": "objet"}), "", "Invalid type: objet"),
        (format_of({"not": {}}), "", "Unimplemented keys"),
        (format_of(json.loads('{"items":' * 150 + "{}" + "}" * 150)), "", "recursion limit"),
        (format_of({"$ref": "#"}), "", "no answer can match it"),
        (
            format_of({"enum": ["x" * GRAMMAR_BYTES_MAX]}),
            ".json_schema.schema",
            f"at most {GRAMMAR_BYTES_MAX} bytes",
        ),
        (
            format_of({"enum": ["x" * (GRAMMAR_BYTES_MAX - 9)]}),  # with what comes around it
            "",
            f"at most {GRAMMAR_BYTES_MAX} bytes",
        ),
    ],
)
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_bad_formats_are_refused_by_name(house, path, body, given, field, said):
    response = await house.http.post(path, json=body | {"response_format": given})
    check_error(response, 400, f"response_format{field}", "invalid_value")
    assert said in response.json()["error"]["message"]
    assert house.workers[0].submits == []


async def test_an_answer_with_a_grammar_can_end(house):
    body = COMPLETION | {"response_format": {"type": "json_object"}, "ignore_eos": True}
    response = await house.http.post("/v1/completions", json=body)
    check_error(response, 400, "ignore_eos", "invalid_value")
    assert house.workers[0].submits == []


async def test_a_checkpoint_without_tokens_for_grammars(open_house, model_dir, tmp_path):
    checkpoint = shutil.copytree(model_dir, tmp_path / "model")
    house = await open_house(checkpoint=checkpoint)
    await house.add()
    house.app._tokenizer.grammars.__init__(tmp_path)  # as of a directory without tokenizer.json
    body = COMPLETION | {"response_format": {"type": "json_object"}}
    response = await house.http.post("/v1/completions", json=body)
    check_error(response, 400, "response_format", "invalid_value")
    assert "tokenizer.json" in response.json()["error"]["message"]
    assert (await house.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_checkpoint_that_names_no_end(open_house, model_dir, tmp_path):
    checkpoint = shutil.copytree(model_dir, tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = checkpoint / name
        left = {k: v for k, v in json.loads(file.read_text()).items() if "eos_token" not in k}
        file.write_text(json.dumps(left))
    house = await open_house(checkpoint=checkpoint)
    await house.add()
    body = COMPLETION | {"response_format": {"type": "json_object"}}
    response = await house.http.post("/v1/completions", json=body)
    check_error(response, 400, "response_format", "invalid_value")
    assert "ends an answer" in response.json()["error"]["message"]
