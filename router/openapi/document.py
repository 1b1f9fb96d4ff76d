"""An OpenAPI document from the pages of a port, the models of their bodies, and the error tree."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from disagg.errors import CancelledError, ConfigError, DisaggError
from disagg.router.openai.body import IGNORED
from disagg.router.openai.chat_message import MESSAGE_IGNORED, Message
from disagg.router.openai.sse import to_json
from disagg.router.openapi.answers import Error
from disagg.router.openapi.operation import EVENTS, JSON, TEXT, Operation

REF = "#/components/schemas/{model}"
OF_EVERY_PAGE = frozenset({400, 431, 500, 503})
"""Of heads and connections, and of bugs."""
OF_KEYS = frozenset({401, 403})
EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})
KEYED: list[dict[str, list[str]]] = [{"bearer": []}, {"header": []}]
"""A key is shown in one of these ways."""
OPEN = [{}, *KEYED]
TEXTS = (TEXT, EVENTS)
RETRY_STATUSES = frozenset({429, 503})

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a page is."""

    method: str
    path: str
    """Its beginning, where the page has a path parameter."""
    operation: Operation
    needs_key: bool


@lru_cache(maxsize=8)
def document_of(title: str, routes: tuple[Route, ...], model_name: str) -> bytes:
    """The document of a port, as JSON; made once in a process, however many routers it starts.

    Args:
        title: of the port.
        routes: its pages.
        model_name: the only ``model`` that bodies may name.
    """
    schemas, refs = _schemas(routes, model_name)
    paths: Json = {}
    for route in routes:
        name = route.operation.path_parameter
        path = f"{route.path}{{{name}}}" if name else route.path
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, refs)
    document = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version("disagg")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return to_json(document)


def _schemas(routes: tuple[Route, ...], model_name: str) -> tuple[Json, Json]:
    """Schemas by name, and a reference to each type's by the name of its operation."""
    kinds: list[tuple[str, Any, Any]] = [("error", "serialization", TypeAdapter(Error))]
    for route in routes:
        operation = route.operation
        if operation.body is not None:
            kinds.append((operation.name, "validation", TypeAdapter(operation.body)))
        for status, kind in operation.answers.items():
            if kind not in TEXTS:
                kinds.append((f"{operation.name}/{status}", "serialization", TypeAdapter(kind)))
    made, whole = TypeAdapter.json_schemas(kinds, ref_template=REF)
    schemas: Json = whole["$defs"]
    for schema in schemas.values():
        for one in (schema, *schema.get("properties", {}).values()):
            _tidy(one)
    for route in routes:
        if route.operation.body is not None:
            _complete(schemas[route.operation.body.__name__], route.operation, model_name)
    if Message.__name__ in schemas:
        known = schemas[Message.__name__]["properties"]
        known |= {name: _neutral(EMPTY) for name in MESSAGE_IGNORED}
        known["type"] = _neutral(("text",))
    return schemas, {name: schema for (name, _), schema in made.items()}


def _tidy(schema: Json) -> None:
    """Leave out what repeats something, and say what pydantic leaves out."""
    schema.pop("title", None)  # the name
    if not schema.get("default"):
        schema.pop("default", None)  # that it is not required
    for form in schema.get("anyOf", ()):
        if "patternProperties" in form:
            form["additionalProperties"] = False


def _complete(schema: Json, operation: Operation, model_name: str) -> None:
    """Add to a body's schema the fields that its model does not have."""
    fields = schema["properties"]
    if "model" not in fields:
        return  # an operator's, which has no fields but its own
    fields["model"] |= {"enum": [model_name, *([None] if "anyOf" in fields["model"] else [])]}
    for name, values in sorted(operation.neutral.items()):
        fields.setdefault(name, _neutral((None, *values)))
    for name in sorted(IGNORED):
        fields.setdefault(name, {"description": "Ignored."})


def _neutral(values: tuple[object, ...]) -> Json:
    return {"enum": list(values), "description": "Not supported: nothing else passes."}


def _operation(route: Route, refs: Json) -> Json:
    operation = route.operation
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": dict(_responses(route, refs)),
        "security": KEYED if route.needs_key else OPEN,
    }
    if operation.body is not None:
        content = {JSON: {"schema": refs[operation.name]}}
        described["requestBody"] = {"required": True, "content": content}
    parameters = []
    if operation.path_parameter:
        parameters.append(_parameter(operation.path_parameter, "path"))
    if operation.query:
        parameters.append(_parameter(operation.query, "query"))
    if operation.body is not None:
        parameters.append(_parameter("x-request-id", "header"))
    return described | ({"parameters": parameters} if parameters else {})


def _parameter(name: str, place: str) -> Json:
    schema = {"type": "string", "minLength": 1} if place == "path" else {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(route: Route, refs: Json) -> Iterator[tuple[str, Json]]:
    operation = route.operation
    for status, kind in operation.answers.items():
        if kind in TEXTS:
            content: Json = {kind: {"schema": {"type": "string"}}}
        else:
            content = {JSON: {"schema": refs[f"{operation.name}/{status}"]}}
        if operation.streams:
            content[EVENTS] = {"schema": {"type": "string"}}
        yield str(status), {"description": HTTPStatus(status).phrase, "content": content}
    errors = OF_EVERY_PAGE | operation.errors | (OF_KEYS if route.needs_key else frozenset())
    codes = _codes()
    for status in sorted(errors - operation.answers.keys()):
        response: Json = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(codes.get(status, ()))}",
            "content": {JSON: {"schema": refs["error"]}},
        }
        if status in RETRY_STATUSES:
            seconds = {"schema": {"type": "integer"}, "description": "Seconds."}
            response["headers"] = {"Retry-After": seconds}
        yield str(status), response


def _codes() -> dict[int, list[str]]:
    """What errors say in ``code``, by status."""
    found: dict[int, set[str]] = {}
    kinds: list[type[DisaggError]] = [DisaggError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if not issubclass(kind, CancelledError | ConfigError):  # nobody is there to be answered
            found.setdefault(kind.http_status, set()).add(kind.code)
    return {status: sorted(codes) for status, codes in found.items()}
