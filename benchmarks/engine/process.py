"""One engine as a subprocess that obeys orders."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.servers.environment import ROOT, check_python


class Process:
    """A subject's process; one order at a time."""

    def __init__(self, python: Path, name: str, checkpoint: Path, num_threads: int) -> None:
        check_python(python, "benchmarks.engine")
        self.name = name
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.engine.subject", name, checkpoint, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | threads | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        )

    def __enter__(self) -> "Process":
        self._read()
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

    def prefill(self, prompt: Sequence[int]) -> dict[str, float]:
        """Seconds from a prompt to its first token."""
        return dict(self._ask({"prefill": prompt}))

    def fill(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> None:
        """Bring sequences to their decode."""
        self._ask({"fill": prompts, "temperature": temperature})

    def decode(self, num_steps: int) -> dict[str, float]:
        """Seconds per step in which every sequence gets a token."""
        return _per(num_steps, self._ask({"decode": num_steps}))

    def share(self, num_steps: int) -> dict[str, float]:
        """Like `decode`, with CPU seconds of vLLM's runner."""
        return _per(num_steps, self._ask({"share": num_steps}))

    def clear(self) -> list[list[int]]:
        """End all sequences; returns their tokens."""
        answers: list[list[int]] = self._ask({"clear": 1})
        return answers

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process of {self.name} has ended; its message is above")
        return json.loads(line)


def _per(num_steps: int, spent: dict[str, float]) -> dict[str, float]:
    return {name: seconds / num_steps for name, seconds in spent.items()}
