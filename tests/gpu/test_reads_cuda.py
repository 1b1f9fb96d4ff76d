"""How UCX reads one process's device memory from another on the same GPU."""

import os
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

ROOT = Path(__file__).parents[2]


def ways_of_reading(log: str, into: str) -> Iterator[str]:
    """The row for the largest READs of each table on reading into such memory."""
    reading: set[str] = set()
    for line in log.splitlines():
        head, _, row = line.partition("|")
        thread = head.partition("]")[2]
        if "ucp_" in row:
            reading.discard(thread)
            if "memory read by ucp_get" in row and f"into {into}" in row:
                reading.add(thread)
        elif "..inf" in row and thread in reading:
            yield row


@pytest.mark.parametrize("setting", ["", "off"])
def test_the_reader_reads_and_the_owner_does_nothing(setting: str, tmp_path: Path) -> None:
    """Control: where that is forbidden, the owner's CPU sends what is read."""
    # A file per process: into one pipe both write parts of lines.
    environment = os.environ | {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{tmp_path}/%p.log"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.reading_process"],
        cwd=ROOT,
        env=environment | ({READ_VARIABLE: setting} if setting else {}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    ways = [way for log in logs for way in ways_of_reading(log, "cuda")]
    assert ways, logs
    assert all("cuda_ipc" in way for way in ways) == (not setting), ways
