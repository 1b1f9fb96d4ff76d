"""The transfer benchmarks run, print their lines and leave nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.transfer.__main__ import LAYERS
from benchmarks.transfer.node import Node
from benchmarks.transfer.pair import Pair
from benchmarks.transfer.plan import NodePlan
from disagg.messages.identity import RequestKey


class Claims:
    """Says of a request that was never made that it pulled the pool's first blocks."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def same_blocks_for(self, number: int) -> int:
        tables = [list(enumerate(range(1, 17)))]
        self._node.destinations[RequestKey(str(number), 1)] = tables
        return len(tables[0])


ROOT = Path(__file__).parents[2]
BOUND_S = 240


def test_a_pull_is_checked_with_what_was_written() -> None:
    with Pair(NodePlan("", LAYERS, 64)) as pair:
        pull = pair.pull(16 * 16, decode=True)
        assert pull.num_blocks == 16
        assert 0 < pull.reads_s < pull.seal_to_commit_s < pull.exposed_s < BOUND_S
        blocks = pair.extra(pair.reader, Claims, "same_blocks_for", number=77)
        assert blocks == 16
        with pytest.raises(RuntimeError, match="16 of 16 pulled blocks are wrong"):
            pair.checked(77)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transfer", "exposed_time", "checksums"])
def test_the_quick_run_ends_with_lines_and_no_process(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        start_new_session=True,
    )
    assert run.returncode in (0, 1), run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len({line["name"] for line in found}) == len(found) > 5
    assert run.returncode == int(any(line["ok"] is False for line in found))
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not any(f"benchmarks.{name}" in line for line in left.splitlines())
