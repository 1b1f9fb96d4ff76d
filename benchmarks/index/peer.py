"""Dynamo's RadixTree: one case, in the environment that ``--setup`` makes."""

import gc
import json
import statistics
import sys
import time
from importlib import import_module
from typing import Any

from benchmarks.index.workload import Block, Event, events_of, prompt_blocks, resident_bytes


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


def main() -> None:
    """Take the events in, then look the prompt up."""
    order = json.loads(sys.argv[1])
    tree = import_module("dynamo._core").RadixTree()
    spent = num_blocks = num_held = 0
    gc.collect()
    before = resident_bytes()
    for number, event in enumerate(events_of(order)):
        encoded = encode(number, event)
        start = time.process_time_ns()
        tree.apply_event(event.worker, encoded)
        spent += time.process_time_ns() - start
        num_blocks += len(event.blocks)
        num_held += -len(event.blocks) if event.removed else len(event.blocks)
    tree.find_matches([1])  # the events before it have been taken in then
    gc.collect()
    grown = resident_bytes() - before
    samples: list[float] = []
    found: dict[Any, int] = {}
    for _ in range(order["samples"] + 1):
        prompt = [value(Block(0, i)) for i in range(prompt_blocks(order["block_tokens"]))]
        start = time.process_time_ns()
        found = tree.find_matches(prompt).scores
        samples.append((time.process_time_ns() - start) / 1e6)
    total = sum(found.values())
    print(json.dumps({
        "ms": statistics.median(samples[1:]), "found_blocks": total, "num_found": len(found),
        "blocks_per_s": num_blocks / spent * 1e9, "bytes": grown / num_held,
    }))  # fmt: skip


main()
