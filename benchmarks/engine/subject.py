"""One engine as a process that obeys orders: ``python -m benchmarks.engine.subject NAME ...``.

An order is a line of JSON on standard input, its answer one on standard output. Times are those of
the whole process: every subject computes in one.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every engine is built for; the pool holds what the cases fill."""

    checkpoint: Path
    num_threads: int = 1
    num_blocks: int = 9_000
    block_tokens: int = 32
    max_model_tokens: int = 8_192
    max_step_tokens: int = 2_048
    max_sequences: int = 64


class Subject(Protocol):
    """An engine that is measured."""

    def prefill(self, prompt: Tokens) -> int:
        """Compute a prompt to its first token and forget it."""
        ...

    def fill(self, prompts: Sequence[Tokens], temperature: float) -> None:
        """Bring a sequence per prompt to its decode; the first of them may be there already."""
        ...

    def decode(self, num_steps: int) -> None:
        """Compute steps in which every sequence gets one token."""
        ...

    def clear(self) -> list[list[int]]:
        """End all sequences; returns the tokens that each has got."""
        ...


def make_subject(name: str, bounds: Bounds) -> Subject:
    """Build an engine by its name; only its own libraries are imported."""
    if name in ("native", "vllm"):
        from benchmarks.engine.ours import Ours

        return Ours(name, bounds)
    if name == "vllm_alone":
        from benchmarks.engine.vllm_alone import VllmAlone

        return VllmAlone(bounds)
    from benchmarks.engine.generate import Generate

    return Generate(bounds)


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Run a call; returns its seconds by the clock and of the process's CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def obey(subject: Subject, order: dict[str, Any]) -> Any:
    """Carry out one order; returns its answer."""
    match order:
        case {"prefill": prompt}:
            return timed(lambda: subject.prefill(prompt))
        case {"fill": prompts, "temperature": temperature}:
            return subject.fill(prompts, temperature)
        case {"decode": num_steps}:
            return timed(lambda: subject.decode(num_steps))
        case {"clear": _}:
            return subject.clear()
        case {"share": num_steps}:
            from benchmarks.engine.runner_clock import RunnerClock

            with RunnerClock() as clock:
                spent = timed(lambda: subject.decode(num_steps))
            return spent | {"runner": clock.seconds}
    raise ValueError(f"unknown order {sorted(order)}")


def main() -> None:
    """Read orders until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("num_threads", type=int)
    chosen = parser.parse_args()
    # Libraries print; the answers go where standard output was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    subject = make_subject(chosen.name, Bounds(chosen.checkpoint, chosen.num_threads))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(subject, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
