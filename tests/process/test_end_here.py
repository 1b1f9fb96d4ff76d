"""The preStop hook of a worker's pod: its workers drain before Ray is stopped."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.process.program import Program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

OWN_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
BOUND_S = 400.0


def test_the_hook_drains_the_workers_of_its_pod_and_waits(tmp_path: Path) -> None:
    tried = subprocess.run([*OWN_PIDS, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no PID namespace of its own: {tried.stderr.strip()}")
    (tmp_path / "config.json").write_text("{}")
    pod = Program(
        "tests.process.pod_main",
        str(tmp_path),
        cwd=tmp_path,
        before=OWN_PIDS,
        environment=os.environ | {"RAY_raylet_start_wait_time_s": "200"},  # on a busy machine
    )
    try:
        found = pod.wait_for(r"^workers \[(\d+), (\d+)\] found \[(\d+), (\d+)\]$", BOUND_S)
        assert found.groups()[:2] == found.groups()[2:]
        # One stands still: it is waited for, within the bound, and named.
        hook = pod.wait_for(r"^hook (\d+) left (.*) said (.*)$", BOUND_S)
        assert hook[1] == "1"
        assert hook[2] == f"[{found[1]}]"
        assert hook[3].endswith(f"still run after 20 s: pid {found[1]}")
        # It goes on, and drains as it was asked to; with nobody left the hook ends at once.
        hook = pod.wait_for(r"^hook (\d+) left (.*) said ?(.*)$", BOUND_S)
        assert hook[1] == "0"
        assert hook[2] == "[]"
        assert pod.process.wait(BOUND_S) == 0
    finally:
        pod.end()
    drained = {path.name for path in tmp_path.glob("drained-*")}
    assert drained == {"drained-prefill-0", "drained-decode-0"}
