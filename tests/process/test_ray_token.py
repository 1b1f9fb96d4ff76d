"""Who joins a Ray cluster without its token is told so at once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.harness import ROOT, WAIT_S
from tests.process.program import BOUND_S, Program

pytestmark = pytest.mark.timeout(300)


def scale(address: str, home: Path, **token: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    given = ["--ray-address", address, "--set", f"cluster.join_timeout_s={10 * WAIT_S:.0f}"]
    return subprocess.run(
        [sys.executable, "-m", "disagg.commands", "scale", *given],
        env=kept | {"HOME": str(home)} | token,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )


def test_a_token_that_is_missing_or_wrong_is_said_at_once(tmp_path: Path) -> None:
    """Not after ``cluster.join_timeout_s``, which is longer here than the test waits."""
    ray = Program("tests.process.ray_main", str(tmp_path), cwd=tmp_path)
    try:
        _, address, token = ray.wait_for(r"^ray (\S+) (\w+)$")[0].split()
        for given in (
            {},
            {"RAY_AUTH_MODE": "token"},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64},
        ):
            run = scale(address, tmp_path, **given)
            assert run.returncode == 2
            assert re.fullmatch(r"disagg: cluster\.ray_address: the token of .*\n", run.stderr), run
            assert "RAY_AUTH_TOKEN" in run.stderr
            assert "start it again with --prefill and --decode" in run.stderr  # who cannot have it
        # Negative control: who has the token gets in.
        run = scale(address, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        assert "no supervisor has run in this Ray cluster" in run.stderr
        assert ray.process.stdin is not None
        ray.process.stdin.close()
        assert ray.process.wait(BOUND_S) == 0
    finally:
        ray.end()
