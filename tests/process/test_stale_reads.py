"""The benchmark of stale reads, our side: never wrong, and wrong without the commit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUND_S = 1_500


@pytest.mark.slow
@pytest.mark.timeout(BOUND_S + 60)
def test_the_quick_run_of_our_side_ends_well_and_leaves_no_process() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.stale_reads", "--quick", "--ours"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        start_new_session=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    controls = [line for name, line in found.items() if name.startswith("control")]
    assert controls
    for line in found.values():
        assert (line["ours"] > 0) == (line in controls), line
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not any("benchmarks.stale_reads" in line for line in left.splitlines())
