"""The peer's environment, and the peer as a subprocess in it."""

import json
import subprocess
import sys
import venv
from pathlib import Path
from types import TracebackType
from typing import Any

PEER = "vllm==0.33.0"
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED = [
    "transformers",
    "pydantic",
    "numpy",
    "msgspec",
    "cbor2",
    "pyzmq",
    "cloudpickle",
    "psutil",
    "requests",
    "cachetools",
    "blake3",
    "pillow",
    "aiohttp",
    "openai",
    "networkx",
    "sympy",
    "jinja2",
    "fsspec",
    "filelock",
]
"""What vLLM really uses on the way to its coordinator; the rest is stubbed."""

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = FOLDER.parents[1] / ".cache" / "bench-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"


def set_up() -> None:
    """Create the environment (about 2 GB, a few minutes); what is there already is kept."""
    if not PYTHON.exists():
        print(f"1/4 creating {ENVIRONMENT}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
    print(f"2/4 installing {', '.join(NEEDED)}", flush=True)
    _install("-q", *NEEDED)
    print(f"3/4 installing {TORCH} (CPU build where its index can be reached)", flush=True)
    _install("--no-deps", "--retries", "1", "--extra-index-url", CPU_INDEX, TORCH)
    print(f"4/4 installing {PEER} without what it needs to serve (400 MB)", flush=True)
    _install("--no-deps", PEER)
    with Peer() as peer:
        print(f"ready: {peer.name}")


def _install(*arguments: str) -> None:
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    if subprocess.run([*pip, *arguments]).returncode:
        sys.exit(
            "pip has failed; its message is above.\n"
            "The packages come from PyPI, or from where pip is configured to look: is it reachable?"
            "\n--setup goes on where it stopped."
        )


class Peer:
    """The peer's process; one order at a time."""

    def __init__(self) -> None:
        if not PYTHON.exists():
            sys.exit(
                "the peer's environment is missing; create it with\n"
                "  python -m benchmarks.coordinator --setup"
            )
        self._process = subprocess.Popen(
            [PYTHON, FOLDER / "peer.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._read()
        self.name = f"{hello['name']} {hello['version']} (torch {hello['torch']})"

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the peer ended; its message is above (try --setup again)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def prepare(self, order: dict[str, Any]) -> None:
        """Build a case."""
        self._ask(order)

    def sample(self) -> Any:
        """Time the case once."""
        return self._ask({"sample": 1})["samples"][0]
