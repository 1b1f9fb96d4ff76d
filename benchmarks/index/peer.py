"""Dynamo's RadixTree: one case, in the environment that ``--setup`` makes."""

import json
import sys
import time
from importlib import import_module
from typing import Any

from benchmarks.index.turns import serve
from benchmarks.index.workload import Block, Event


def value(block: Block) -> int:
    """The hash of a block: of its tokens and of its prefix, both the same here."""
    return (block.prompt << 32 | block.index) * 0x9E3779B97F4A7C15 % (1 << 63)


def encode(number: int, event: Event) -> bytes:
    """An event as the tree takes it."""
    values = [value(block) for block in event.blocks]
    data: dict[str, Any]
    if event.removed:
        data = {"removed": {"block_hashes": values}}
    else:
        parent = value(event.parent) if event.parent is not None else None
        blocks = [{"block_hash": one, "tokens_hash": one} for one in values]
        data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


class Peer:
    """The tree; see `benchmarks.index.turns.Side`. It works in a thread of its own."""

    def __init__(self) -> None:
        self._tree = import_module("dynamo._core").RadixTree()
        self._number = self.num_held = 0
        """Events, and blocks by them: those that a worker is told to have twice count twice."""

    def take_in(self, event: Event) -> tuple[int, int]:
        """With the parsing of its JSON, and what its thread still did of the event before."""
        self._number += 1
        start, begin = time.process_time_ns(), time.thread_time_ns()
        encoded, num = encode(self._number, event), len(event.blocks)
        encoding = time.thread_time_ns() - begin
        self.num_held += -num if event.removed else num
        self._tree.apply_event(event.worker, encoded)
        return num, time.process_time_ns() - start - encoding

    def make(self, block: Block) -> int:
        """A hash."""
        return value(block)

    def look_up(self, prompt: list[int]) -> tuple[dict[str, int], int, int]:
        """Blocks per worker."""
        start = time.process_time_ns()
        scores = self._tree.find_matches(prompt).scores
        taken = time.process_time_ns() - start
        return {"ms": taken}, sum(scores.values()), len(scores)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), Peer)
