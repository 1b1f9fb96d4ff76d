"""Either side as a program of its own; the peer's has an environment of its own."""

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

PEER = "ai-dynamo-runtime==1.6.1"
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".cache" / "bench-dynamo"
PYTHON = ENVIRONMENT / "bin" / "python"


def set_up() -> None:
    """Create the peer's environment (70 MB, under a minute); what is there already is kept."""
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", PEER]
    if subprocess.run(pip).returncode:
        sys.exit("pip has failed; its message is above. Is PyPI reachable?")


def python_of(side: str) -> str:
    """The interpreter that runs a side."""
    if side != "peer":
        return sys.executable
    if not PYTHON.exists():
        sys.exit("the peer's environment is missing: python -m benchmarks.index --setup")
    return str(PYTHON)


def run(program: str, order: dict[str, Any]) -> dict[str, Any]:
    """One case by a program that does it in one go, in a fresh process."""
    command = [python_of(program), "-m", f"benchmarks.index.{program}", json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{program} has failed in {order}; its message is above")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
