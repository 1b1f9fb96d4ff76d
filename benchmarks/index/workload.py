"""What workers hold and what happens to it, the same for both sides; needs nothing but Python."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 131_072
SHAPES = ("shared", "partly", "distinct")
OWN_BLOCKS_MAX = 64
PIECE_BLOCKS = 64
DISTINCT_BLOCKS = {10: 8192, 100: 4096, 1000: 1024}
"""Of other prompts, per worker: several million blocks in all would measure patience."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of one prompt: the ``index``-th of prompt ``prompt``; 0 is the one looked up."""

    prompt: int
    index: int


@dataclass(frozen=True, slots=True)
class Event:
    """A worker stores consecutive blocks after ``parent``, or removes some."""

    worker: int
    blocks: tuple[Block, ...]
    parent: Block | None
    removed: bool = False


def prompt_blocks(block_tokens: int) -> int:
    """Blocks of the prompt."""
    return TOKENS // block_tokens


def holdings(shape: str, num_workers: int, block_tokens: int) -> Iterator[Event]:
    """What each worker holds of the prompt and of others, an event per piece of a prompt.

    *unknown* is *distinct* without the one worker that holds the prompt.
    """
    chance, num = random.Random(f"{shape} {num_workers}"), prompt_blocks(block_tokens)
    whole = tuple(Block(0, i) for i in range(num))
    for worker in range(int(shape == "unknown"), num_workers):
        if shape == "shared" or (shape == "distinct" and worker == 0):
            yield Event(worker, whole, None)
        elif shape == "partly":
            length = chance.randint(1, num)
            yield Event(worker, whole[:length], None)
            own = range(length, length + chance.randint(1, OWN_BLOCKS_MAX))
            yield Event(worker, tuple(Block(worker + 1, i) for i in own), whole[length - 1])
        else:
            own = range(min(num, DISTINCT_BLOCKS[num_workers]))
            yield Event(worker, tuple(Block(worker + 1, i) for i in own), None)


def out_of_order(num_workers: int, block_tokens: int) -> Iterator[Event]:
    """The same as *partly*, each beginning in pieces of 64 blocks, told in any order."""
    chance = random.Random(num_workers)
    for event in holdings("partly", num_workers, block_tokens):
        firsts = list(range(0, len(event.blocks), PIECE_BLOCKS))
        chance.shuffle(firsts)
        for first in firsts:
            before = event.blocks[first - 1] if first else event.parent
            yield Event(event.worker, event.blocks[first : first + PIECE_BLOCKS], before)


def one_block_events(num_workers: int, num_blocks: int) -> Iterator[Event]:
    """Every worker's prompt grows block by block, in turn: half of it the same for all."""
    for index in range(num_blocks):
        for worker in range(num_workers):
            prompt = 0 if 2 * index < num_blocks else worker + 1
            before = 0 if 2 * (index - 1) < num_blocks else worker + 1
            parent = Block(before, index - 1) if index else None
            yield Event(worker, (Block(prompt, index),), parent)


def churn(num_workers: int, num_blocks: int, num_turns: int) -> Iterator[Event]:
    """Prompts of 64 to 512 blocks come and go: the least recently stored goes, its end first."""
    chance = random.Random(num_workers)
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(num_workers)]
    common, prompt = 16, num_workers + 1
    for _ in range(num_turns):
        for worker in range(num_workers):
            length = chance.randint(64, 512)
            prompt += 1
            beginning = tuple(Block(0, i) for i in range(common))
            own = tuple(Block(prompt, i) for i in range(common, length))
            yield Event(worker, beginning + own, None)
            held[worker].append((prompt, common, length))
            while sum(end - begin for _, begin, end in held[worker]) > num_blocks:
                old, begin, end = held[worker][0]
                cut = max(begin, end - 32)
                gone = tuple(Block(old, i) for i in range(end - 1, cut - 1, -1))
                yield Event(worker, gone, None, removed=True)
                held[worker][0] = (old, begin, cut)
                if cut == begin:
                    del held[worker][0]


def events_of(order: dict[str, Any]) -> Iterator[Event]:
    """The events of a case."""
    workers = order["workers"]
    if order["shape"] == "single":
        return one_block_events(workers, order["blocks"])
    if order["shape"] == "churn":
        return churn(workers, order["blocks"], order["turns"])
    if order["shape"] == "out of order":
        return out_of_order(workers, order["block_tokens"])
    return holdings(order["shape"], workers, order["block_tokens"])


def resident_bytes() -> int:
    """Memory of this process, without code and other files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096
