"""The OpenAPI documents: valid, of all pages, with the fields that parsers take, and no others."""

import json
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest
from openapi_spec_validator.validation.exceptions import OpenAPIValidationError

from disagg.errors import RequestError
from disagg.router.keys import hash_of, new_key
from disagg.router.openai.body import IGNORED, UNSUPPORTED
from disagg.router.openai.chat_request import ChatRequest, parse_chat
from disagg.router.openai.completion_request import CompletionRequest, parse_completion
from disagg.router.openai.responses_request import NEUTRAL, ResponsesRequest, parse_responses
from disagg.router.openai.tokenize_request import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (parse_completion, {"model": "tiny", "prompt": [5, 6]}),
    "/v1/chat/completions": (parse_chat, {"model": "tiny", "messages": MESSAGES}),
    "/v1/responses": (parse_responses, {"model": "tiny", "input": "hi"}),
    "/tokenize": (parse_tokenize, {"prompt": "hi"}),
    "/detokenize": (parse_detokenize, {"tokens": [5, 6]}),
}
NAMES = (
    {
        name
        for kind in (ChatRequest, CompletionRequest, ResponsesRequest)
        for name in kind.model_fields
    }
    | TokenizeRequest.model_fields.keys()
    | DetokenizeRequest.model_fields.keys()
    | UNSUPPORTED.keys()
    | NEUTRAL.keys()
    | IGNORED
    | {"nobody_knows_it"}
)
PATHS = {
    "clients": {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/openapi.json",
    },
    "operators": {
        "/metrics",
        "/v1/disagg/workers",
        "/v1/disagg/queues",
        "/v1/disagg/status",
        "/v1/disagg/events",
        "/v1/disagg/requests/{id}",
        "/v1/disagg/revisions",
        "/v1/disagg/drain",
        "/reset_prefix_cache",
        "/health",
        "/ready",
        "/openapi.json",
    },
}


async def documents(house):
    found = {"clients": house.http, "operators": house.admin}
    return {name: (await http.get("/openapi.json")).json() for name, http in found.items()}


def schema_of(document, schema):
    return schema | {"components": document["components"]}


def body_schema(document, path):
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]


def refusal(parse, body):
    """Why a parser refuses a body; None where it does not."""
    try:
        parse(json.dumps(body).encode())
    except RequestError as error:
        return error
    return None


def conforms(document, path, method, answer):
    """Raise unless the answer is one of those that the document has."""
    response = document["paths"][path][method]["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    jsonschema.validate(answer.json(), schema_of(document, response["content"][kind]["schema"]))


async def test_both_are_valid(house):
    for document in (await documents(house)).values():
        assert document["openapi"] == "3.1.0"
        openapi_spec_validator.validate(document)
        ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
        assert len(ids) == len(set(ids))
    document["paths"]["/health"]["get"].pop("responses")
    document["paths"]["/health"]["get"]["parameters"] = [{"name": "lacks its place"}]
    with pytest.raises(OpenAPIValidationError):  # control
        openapi_spec_validator.validate(document)


async def test_every_page_is_there_and_no_other(house):
    found = await documents(house)
    assert {name: set(document["paths"]) for name, document in found.items()} == PATHS
    for http, document in zip((house.http, house.admin), found.values(), strict=True):
        for path, operations in document["paths"].items():
            asked = path.partition("{")[0]
            answer = await http.options(asked)
            assert answer.status_code == 405, asked
            taken = answer.json()["error"]["message"].partition(" takes ")[2].split(", ")
            assert [method.upper() for method in operations] == taken
        assert (await http.options("/nothing")).status_code == 404


async def test_documented_fields_are_those_that_the_parsers_take(house):
    document = (await documents(house))["clients"]
    for path, (parse, body) in BODIES.items():
        documented = set(body_schema(document, path)["properties"])
        known = set()
        for name in NAMES:
            refused = refusal(parse, {name: None} | body)
            if refused is None or refused.message != "unknown field":
                known.add(name)
        assert documented == known, path
        assert "nobody_knows_it" not in known


async def test_documented_values_are_those_that_the_parsers_take(house):
    """What is neutral passes; what is out of a documented bound does not."""
    document = (await documents(house))["clients"]
    num = 0
    for path, (parse, body) in BODIES.items():
        schema = schema_of(document, body_schema(document, path))
        for name, field in schema["properties"].items():
            values = list(field.get("enum", ()))
            for form in (field, *field.get("anyOf", ())):
                values += [form[bound] for bound in ("minimum", "maximum") if bound in form]
                if "minimum" in form:
                    values.append(form["minimum"] - 1)
                if "maximum" in form:
                    values.append(form["maximum"] + 1)
            for value in [*values, "x" * 5000, {"x": 1}, [[1]], True, 0.5]:
                given = body | {name: value}
                valid = jsonschema.Draft202012Validator(schema).is_valid(given)
                refused = refusal(parse, given)
                at = (path, name, value, refused)
                if refused is None:
                    # Bounds that wait for the tokenizer or the fleet are checked behind parsers.
                    assert valid or name in CHECKED_LATER, at
                else:
                    assert not valid or refused.param in TOGETHER, at
                num += 1
    assert num > 500


TOGETHER = {
    "best_of",
    "n",
    "max_tokens",
    "prompt",
    "stream_options",
    "prompt_logprobs",
    "top_logprobs",
    "response_format.json_schema",
    "tool_choice",
    "tools",
    "chat_template_kwargs",
}
"""What goes only with another field."""
CHECKED_LATER = {"stop", "stop_token_ids", "prompt", "model"}


async def test_answers_have_the_documented_form(house):
    document = (await documents(house))["clients"]
    for path, (_, body) in BODIES.items():
        more: list[dict[str, Any]] = [
            {},
            {"model": 5},
            {"model": "another"},
            {"nobody_knows_it": 1},
        ]
        if path == "/v1/completions":
            more += [
                {"n": 2, "logprobs": 3, "return_token_ids": True},
                {"logprobs": 0, "best_of": 2, "n": 1},
            ]
        if path == "/v1/chat/completions":
            more += [{"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True}]
        if path == "/tokenize":
            more += [{"return_token_strs": True}]
        for fields in more:
            limit: dict[str, Any] = {} if "tokenize" in path else {"max_tokens": 3}
            if path == "/v1/responses":
                limit = {"max_output_tokens": 3}
            answer = await house.http.post(path, json=body | limit | fields)
            assert answer.status_code < 500, answer.text
            conforms(document, path, "post", answer)
            if answer.status_code == 200:
                spoilt = answer.json() | {"undocumented": 1}
                schema = document["paths"][path]["post"]["responses"]["200"]["content"]
                with pytest.raises(jsonschema.ValidationError):  # control
                    jsonschema.validate(
                        spoilt, schema_of(document, schema["application/json"]["schema"])
                    )
    for path in ("/v1/models", "/health", "/ready", "/openapi.json"):
        conforms(document, path, "get", await house.http.get(path))
    conforms(document, "/v1/models/{model}", "get", await house.http.get("/v1/models/tiny"))


async def test_operators_answers_have_the_documented_form(house):
    document = (await documents(house))["operators"]
    answer = await house.http.post(
        "/v1/completions", json=BODIES["/v1/completions"][1] | {"max_tokens": 2}
    )
    name = answer.json()["id"]
    conforms(document, "/v1/disagg/workers", "get", await house.admin.get("/v1/disagg/workers"))
    conforms(document, "/v1/disagg/queues", "get", await house.admin.get("/v1/disagg/queues"))
    record = await house.admin.get(f"/v1/disagg/requests/{name}")
    assert record.status_code == 200
    conforms(document, "/v1/disagg/requests/{id}", "get", record)
    missing = await house.admin.get("/v1/disagg/requests/none")
    assert missing.status_code == 404
    conforms(document, "/v1/disagg/requests/{id}", "get", missing)
    conforms(document, "/v1/disagg/status", "get", await house.admin.get("/v1/disagg/status"))
    revisions = await house.admin.get("/v1/disagg/revisions")
    conforms(document, "/v1/disagg/revisions", "get", revisions)
    for body in ({"weights": {"default": 2}}, {"weights": {"default": -1}}, {"more": 1}):
        conforms(
            document,
            "/v1/disagg/revisions",
            "put",
            await house.admin.put("/v1/disagg/revisions", json=body),
        )
    for http in ("/reset_prefix_cache", "/reset_prefix_cache?all=1"):
        conforms(document, "/reset_prefix_cache", "post", await house.admin.post(http))


async def test_every_key_may_read_it_and_nobody_else(open_house):
    key = new_key()
    entry = {"name": "one", "tenant": "alice", "sha256": hash_of(key), "scopes": ["serve"]}
    house = await open_house(api_keys=json.dumps({"keys": [entry]}))
    for http in (house.http, house.admin):
        assert (await http.get("/openapi.json")).status_code == 401
        answer = await http.get("/openapi.json", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        assert answer.json()["paths"]["/openapi.json"]["get"]["security"][0] == {"bearer": []}
        assert {} in answer.json()["paths"]["/health"]["get"]["security"]
