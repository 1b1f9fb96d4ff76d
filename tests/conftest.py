"""Which tests stay together when several run at a time (`pytest -n`)."""

from pathlib import PurePosixPath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.scheduler.protocol import Scheduling

IN_A_ROW = PurePosixPath("tests/process")
"""Its tests share clusters, and start more processes than a small machine has cores."""


class Together(LoadScopeScheduling):
    """A file's tests run in one process, one after the other; those of `IN_A_ROW` as one file."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.partition("::")[0])
        return str(IN_A_ROW if IN_A_ROW in file.parents else file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Not `--dist loadgroup`: xdist 3.8 names groups in node ids, which pytest 9.2 derives anew."""
    return Together(config, log)
