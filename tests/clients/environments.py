"""Environments of the clients, and programs that run in them."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers.program import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 600.0


class ClientError(RuntimeError):
    """A client ended with an error, or says that a request of it failed."""


def environment_of(name: str) -> Path:
    """The folder of an environment; skips the test, with the reason, where it is missing."""
    folder = ROOT / f".venv-clients-{name}"
    if not (folder / ".installed").exists():
        pytest.skip(f"{folder.name} is missing: make setup-clients")
    return folder


def run(
    command: Sequence[object],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> str:
    """Run a client's program offline; returns its standard output.

    Raises:
        ClientError: another exit status than 0, with the end of what it said.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=_own_environment() | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise ClientError(f"{command[0]} ended with {done.returncode}:\n{said}")
    return done.stdout


def call(environment: Path, program: str, given: Mapping[str, Any], cwd: Path) -> Any:
    """Run one of `programs` with what it is given; returns the JSON that it prints last."""
    python = environment / "bin" / "python"
    said = run([python, PROGRAMS / program, json.dumps(given)], cwd=cwd)
    return json.loads(said.splitlines()[-1])


def _own_environment() -> dict[str, str]:
    """Nothing of ours is imported there, nothing is loaded from a hub."""
    ours = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    offline = {
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return ours | ENVIRONMENT | offline
