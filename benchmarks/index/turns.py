"""A case as a program that does one step at a time, and several such programs by turns.

Load from elsewhere comes and goes; step by step it meets all sides alike. What a side is given is
made, and freed, outside the parts of a step that are timed.
"""

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

from benchmarks.index.environment import ROOT, python_of
from benchmarks.index.workload import Block, Event, events_of, prompt_blocks, resident_bytes

BLOCKS_PER_TURN = 32_768
WARM_UP_BLOCKS = 8192

Order = dict[str, Any]
Answer = dict[str, Any]


class Side(Protocol):
    """One index; times are CPU time of the process in ns."""

    @property
    def num_held(self) -> int:
        """(worker, group, block) triples that it has now."""
        ...

    def take_in(self, event: Event) -> tuple[int, int]:
        """Blocks of the event, times groups, and how long it took to take it in."""
        ...

    def make(self, block: Block) -> object:
        """The name of a block, a fresh object."""
        ...

    def look_up(self, prompt: list[Any]) -> tuple[dict[str, int], int, int]:
        """By times: `ms` and others; then blocks found, over all workers, and workers found."""
        ...


def serve(order: Order, started: Callable[[], Side]) -> None:
    """Do what the lines of the standard input say: *events*, *look-up*; at its end answer.

    A first index, which stays, takes in some of the events: what a process keeps for its work
    from then on is not counted to the second one's memory.
    """
    gc.disable()  # nothing here makes circles; what it would go through is the workload's
    first, side = started(), started()
    for some in events_of(order):
        first.take_in(some)
        if first.num_held >= WARM_UP_BLOCKS:
            break
    del some
    gc.collect()
    before, events = resident_bytes(), events_of(order)
    num_blocks = spent = grown = 0
    found: tuple[int, int] = (0, 0)
    times: dict[str, list[float]] = {}
    for line in sys.stdin:
        more = True
        if line == "events\n":
            end = num_blocks + BLOCKS_PER_TURN
            while num_blocks < end and more:
                event = next(events, None)
                more = event is not None
                if event is not None:
                    num, ns = side.take_in(event)
                    num_blocks, spent = num_blocks + num, spent + ns
                del event
            if not more:
                gc.collect()
                grown = resident_bytes() - before
        else:
            prompt = [side.make(Block(0, i)) for i in range(prompt_blocks(order["block_tokens"]))]
            taken, *rest = side.look_up(prompt)
            found = (rest[0], rest[1])
            del prompt
            for name, ns in taken.items():
                times.setdefault(name, []).append(ns / 1e6)
        print(json.dumps(more), flush=True)
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    print(json.dumps(medians | {
        "first_ms": times["ms"][0], "found_blocks": found[0], "num_found": found[1],
        "blocks_per_s": num_blocks / spent * 1e9, "grown_bytes": grown,
        "num_held": side.num_held,
    }))  # fmt: skip


def by_turns(cases: Sequence[tuple[str, Order]]) -> list[Answer]:
    """Sides and their orders, each in a fresh process: its memory is only this case's."""
    processes = [_started(side, order) for side, order in cases]
    for step, num in (("events", None), ("look-up", cases[0][1]["samples"] + 1)):
        left = processes
        while left and num != 0:
            left = [one for one in left if _told(one, step)]
            num = num - 1 if num is not None else None
    answers = []
    for process, (side, order) in zip(processes, cases, strict=True):
        to, from_it = _pipes(process)
        with suppress(BrokenPipeError):
            to.close()
        out = from_it.read()
        process.wait()
        if process.returncode:
            sys.exit(f"{side} has failed in {order}; its message is above")
        answers.append(json.loads(out))
    return answers


def _started(side: str, order: Order) -> "subprocess.Popen[str]":
    command = [python_of(side), "-m", f"benchmarks.index.{side}", json.dumps(order)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def _told(process: "subprocess.Popen[str]", step: str) -> bool:
    """Whether there is more to do of such steps, once this one is done."""
    to, answers = _pipes(process)
    try:
        to.write(f"{step}\n")
        to.flush()
    except BrokenPipeError:  # it has failed, and says so at the end
        return False
    return answers.readline() == "true\n"


def _pipes(process: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
