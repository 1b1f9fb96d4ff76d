"""Skips vLLM's tests where it is missing, unless they were asked for; begins with long ones.

Clients in tests share what they trust: httpx reads all authorities of the world for each one, 25 ms
of CPU, to ask on loopback without TLS.
"""

import gc
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest
from httpx import create_ssl_context

from tests import longest_first

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a line for each server that is stopped, else

pytest.MonkeyPatch().setattr(
    "httpx._transports.default.create_ssl_context", cache(create_ssl_context)
)

REQUIRED = "DISAGG_TEST_VLLM"
"""Set by ``make test-vllm``: a run in which all of them are skipped must not look green."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected, and the libraries it imports, live as long as the run.

    A look through them takes the garbage collector half a second: one after the other while they
    are made, and then whenever a test has left enough.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several (pytest-xdist)
        longest_first.sort(items)
    if find_spec("vllm") is not None:  # found, not imported
        return
    marked = [item for item in items if item.get_closest_marker("vllm")]
    if marked and os.environ.get(REQUIRED):
        raise pytest.UsageError(f"{REQUIRED} is set, but vLLM is not installed")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make install-vllm)"))
