"""Which tests `make test` may run at the same time, each in one of pytest-xdist's processes."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TOGETHER = TESTS / "process"
"""They share clusters, and each is given the machine by the others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file together, and all that start processes."""
    for item in items:
        group = TOGETHER if TOGETHER in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(group.relative_to(TESTS))))
