"""Skips the tests of the vLLM engine where vLLM is missing, unless they are what was asked for."""

import os
from importlib.util import find_spec

import pytest

REQUIRED = "DISAGG_TEST_VLLM"
"""Set by ``make test-vllm``: a run in which all of them are skipped must not look green."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:  # found, not imported
        return
    marked = [item for item in items if item.get_closest_marker("vllm")]
    if marked and os.environ.get(REQUIRED):
        raise pytest.UsageError(f"{REQUIRED} is set, but vLLM is not installed")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make install-vllm)"))
