"""One `disagg serve` for all clients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.clients.served import Served, serving

PROMPT = "the cat sat on the mat " * 8
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 4, "maxLength": 6, "pattern": "^[a-z]+$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One prefill and one decode worker behind a router with API keys."""
    torch.set_num_threads(1)
    with serving(tmp_path_factory.mktemp("clients")) as started:
        yield started


@pytest.fixture
def given(served: Served) -> dict[str, Any]:
    """What the programs of the libraries ask."""
    return {
        "url": f"{served.url}/v1",
        "key": served.key,
        "model": "tiny",
        "prompt": PROMPT,
        "messages": [{"role": "user", "content": "Rain? " + PROMPT}],
        "tools": TOOLS,
        "schema": SCHEMA,
    }
