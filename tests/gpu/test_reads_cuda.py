"""How UCX reads one process's device memory from another on the same GPU."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disagg.workers.nixl_agent import READ_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ROW = re.compile(r"(\[\S+:\d+ :\d+\])\s+(\|.*)")
"""What UCX says of how it moves something, and which of its threads says so."""
ROOT = Path(__file__).parents[2]


def ways_of_reading(said: str) -> Iterator[str]:
    """The row for the largest READs of each table on reading into device memory."""
    reading: set[str] = set()
    for line in said.splitlines():
        if not (found := ROW.search(line)):
            continue
        process, row = found.groups()
        if "ucp_" in row:
            reading.discard(process)
            if "memory read by ucp_get" in row and "into cuda" in row:
                reading.add(process)
        elif "..inf" in row and process in reading:
            yield row


@pytest.mark.parametrize("setting", ["", "off"])
def test_the_reader_reads_and_the_owner_does_nothing(setting: str) -> None:
    """Control: where that is forbidden, the owner's CPU sends what is read."""
    environment = (
        os.environ | {"UCX_PROTO_INFO": "y"} | ({READ_VARIABLE: setting} if setting else {})
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.reading_process"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    ways = list(ways_of_reading(said))
    assert ways, said[-4000:]
    assert all("cuda_ipc" in way for way in ways) == (not setting), ways
