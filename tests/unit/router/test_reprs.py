"""What users write, token ids and salts stay out of reprs and errors, which reach logs."""

import dataclasses
import importlib
import pkgutil

import pytest

import disagg.router
from disagg.errors import RequestError
from disagg.router.generation_request import GenerationRequest
from disagg.router.openai.chat_request import parse_chat
from disagg.router.openai.completion_request import parse_completion
from disagg.router.options import RouterOptions
from disagg.router.text_stream import Piece

PRIVATE = {"cache_salt", "hash_key", "logprobs", "prompt", "stop", "text", "texts", "token_ids"}
SECRETS = ("SECRET", "31337")


def private_fields():
    for module in pkgutil.walk_packages(disagg.router.__path__, "disagg.router."):
        for value in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(value, type)
                and value.__module__ == module.name
                and dataclasses.is_dataclass(value)
            ):
                for field in dataclasses.fields(value):
                    if field.name in PRIVATE:
                        yield f"{value.__name__}.{field.name}", field.repr


def test_private_fields_are_in_no_repr():
    shown = dict(private_fields())
    read = {"GenerationRequest.prompt", "Piece.token_ids", "RouterOptions.hash_key"}
    assert read <= set(shown)
    assert [name for name, in_repr in shown.items() if in_repr] == []


@pytest.mark.parametrize(
    "value",
    [
        GenerationRequest("m", (31337,), "prompt", 3, cache_salt="SECRET", stop=("SECRET",)),
        Piece("SECRET", (31337,), (), "stop"),
        RouterOptions("dir", "m", hash_key="SECRET"),
        parse_completion(b'{"model": "m", "prompt": [31337], "cache_salt": "SECRET"}'),
        parse_completion(b'{"model": "m", "prompt": "SECRET", "stop": "SECRET"}'),
        parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "SECRET"}]}'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reprs_tell_no_secret(value):
    assert not any(secret in repr(value) for secret in SECRETS)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": [31337, "SECRET"]}',
        b'{"model": "m", "prompt": "ok", "cache_salt": ["SECRET"]}',
        b'{"model": "m", "prompt": "ok", "top_k": "SECRET"}',
        b'{"model": "m", "prompt": "SECRET"',
    ],
)
def test_refusals_and_their_causes_tell_no_secret(body):
    with pytest.raises(RequestError) as caught:
        parse_completion(body)
    error = caught.value
    told = f"{error!r} {error} {error.__cause__!r} {error.__cause__}"
    assert not any(secret in told for secret in SECRETS), told
