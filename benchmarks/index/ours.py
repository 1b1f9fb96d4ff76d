"""The router's prefix index: one case."""

import gc
import json
import statistics
import sys
import time
from hashlib import sha256
from typing import Any

from benchmarks.index.workload import Block, events_of, prompt_blocks, resident_bytes
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored, KVEvent
from disagg.messages.registration import GroupInfo
from disagg.routing.index import PrefixIndex

GROUPS = {
    "full": [("full_attention", 0)],
    "full + window 1024": [("full_attention", 0), ("sliding_window", 1024)],
    "full + chunks 8192": [("full_attention", 0), ("chunked_local", 8192)],
    "full + state": [("full_attention", 0), ("linear_state", 0)],
    "window 1024": [("sliding_window", 1024)],
    "window 1024 + state": [("sliding_window", 1024), ("linear_state", 0)],
}


def value(block: Block) -> bytes:
    """The chain value of a block, an object of its own, as it comes off the wire."""
    return sha256(b"%d/%d" % (block.prompt, block.index)).digest()


def groups_of(order: dict[str, Any]) -> list[GroupInfo]:
    """The layout of a case."""
    size = order["block_tokens"]
    return [GroupInfo(kind, size, window, 1, 64) for kind, window in GROUPS[order["groups"]]]


def main() -> None:
    """Take the events in, then look the prompt up."""
    order = json.loads(sys.argv[1])
    block_tokens = order["block_tokens"]
    groups = groups_of(order)
    index = PrefixIndex(groups, block_tokens)
    workers = [Incarnation(str(i), "1") for i in range(order["workers"])]
    for worker in workers:
        index.add(worker, 1 << 30)
    spent, num_blocks = 0, 0
    gc.collect()
    before = resident_bytes()
    for event in events_of(order):
        values = tuple(map(value, event.blocks))
        parent = value(event.parent) if event.parent is not None else None
        events: list[KVEvent] = [
            BlocksRemoved(group, values)
            if event.removed
            else BlocksStored(group, values, parent, 0, block_tokens)
            for group in range(len(groups))
        ]
        worker = workers[event.worker]
        number = index.next_sequence(worker)
        start = time.process_time_ns()
        index.apply(worker, number, False, events)
        spent += time.process_time_ns() - start
        num_blocks += len(values) * len(groups)
    del events, values
    gc.collect()
    grown = resident_bytes() - before
    num_held = sum(map(index.num_entries, workers))
    levels: list[float] = []
    every_worker: list[float] = []
    first = 0.0
    for sample in range(order["samples"] + 1):
        prompt = [value(Block(0, i)) for i in range(prompt_blocks(block_tokens))]
        start = time.process_time_ns()
        found = index.match(len(prompt) * block_tokens + 1, prompt)
        for _ in found.usable:
            pass
        answered = time.process_time_ns()
        tokens = found.usable.tokens
        end = time.process_time_ns()
        if not sample:
            first = (answered - start) / 1e6
        levels.append((answered - start) / 1e6)
        every_worker.append((end - start) / 1e6)
    print(json.dumps({
        "ms": statistics.median(levels[1:]), "first_ms": first,
        "every_worker_ms": statistics.median(every_worker[1:]),
        "found_blocks": sum(tokens.values()) // block_tokens, "num_found": len(tokens),
        "blocks_per_s": num_blocks / spent * 1e9, "bytes": grown / num_held,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
