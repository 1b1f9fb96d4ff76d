"""Marks the tests of this folder, and skips them where hosts cannot be made."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts, find_reason_unavailable, hosts

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session", autouse=True)
def _available() -> None:
    reason = find_reason_unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(3, tmp_path_factory.mktemp("keys")) as made:
        yield made
