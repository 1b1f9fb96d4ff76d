"""A request body as JSON: every field is checked, ignored by name, or refused by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from disagg.errors import RequestError
from disagg.messages.lazy import cached_property
from disagg.router.client_text import clip

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted and without effect: they do not change what is generated."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that would change the answer: only null and these neutral values pass, but for
bodies that have the field."""


UNKNOWN_FIELD = "unknown_field"
ITEMS_MAX = 65_536
"""Prompts, messages or items of one body. All streams wait for what looks at them: for pydantic,
whatever thread it is in, and for what is made of them. So many values may tools have, and the
arguments of all calls."""
OPENINGS_MAX = 1 << 18
"""``[`` and ``{`` of a body, also in texts. All streams wait while lists and maps are made: ten
million take seconds."""


class Strict(BaseModel):
    """An object of a body: no unknown fields, no value of another type than the field's."""

    # What users write stays out of every repr and of pydantic's errors: both may reach a log.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        ignored_types=(cached_property,),
    )

    @model_validator(mode="before")
    @classmethod
    def _has_no_more_fields(cls, value: object) -> object:
        # pydantic would keep an error of each: of millions that takes it minutes.
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            names = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next(name for name in value if name not in names)
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": unknown})
        return value


_Body = TypeVar("_Body", bound=Strict)


def read_object(
    body: bytes, kind: type[Strict], unsupported: Mapping[str, tuple[object, ...]] = UNSUPPORTED
) -> dict[str, Any]:
    """The JSON object of a body, without the fields that are ignored by bodies of a kind.

    Raises:
        RequestError: not a JSON object, or a field that is not supported, by name.
    """
    if body.count(b"[") + body.count(b"{") > OPENINGS_MAX:
        raise RequestError(f"the body has more than {OPENINGS_MAX} [ and {{")
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    for name in data.keys() - kind.model_fields.keys():
        if name in unsupported:
            value = data.pop(name)
            if value is not None and not any(_same(value, ok) for ok in unsupported[name]):
                raise RequestError(f"this value of {name} is not supported", param=name)
        elif name in IGNORED:
            del data[name]
    return data


def validate(kind: type[_Body], data: dict[str, Any]) -> _Body:
    """The fields of a body as its model.

    Raises:
        RequestError: the first field that is wrong or unknown, by name.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _request_error(error) from error


def exceeds(value: object, most: int, *, with_text: bool = False) -> bool:
    """Whether JSON has more values, or values and characters, than ``most``: counted so far."""
    count, waiting = 1, [value]
    while waiting and count <= most:
        one = waiting.pop()
        if isinstance(one, dict | list):
            count += len(one)
            if with_text and isinstance(one, dict):
                count += sum(map(len, one))
            if count <= most:
                waiting.extend(one.values() if isinstance(one, dict) else one)
        elif with_text and isinstance(one, str):
            count += len(one)
    return count > most


def _same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    param, kind = "", first["type"]
    for part in (*first["loc"], *((first["ctx"]["name"],) if kind == UNKNOWN_FIELD else ())):
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            param += f".{clip(part)}" if param else clip(part)
    if kind == "extra_forbidden":
        message = "unknown field"
    elif kind == "missing":
        message = "is required"
    elif kind == "value_error":
        message = str(first["ctx"]["error"])
    elif kind == "model_type":  # pydantic's text names a class
        message = "Input should be a valid object"
    else:
        message = first["msg"]
    return RequestError(message, param=param)
