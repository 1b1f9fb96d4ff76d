"""The router's prefix index: one case."""

import json
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from benchmarks.index.turns import serve
from benchmarks.index.workload import Block, Event
from disagg.kv.kinds.registry import KINDS, sees_everything
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored
from disagg.messages.registration import GroupInfo
from disagg.routing.index import PrefixIndex

GROUPS = {
    "full": [("full_attention", 0)],
    "full + window 1024": [("full_attention", 0), ("sliding_window", 1024)],
    "full + chunks 8192": [("full_attention", 0), ("chunked_local", 8192)],
    "full + state": [("full_attention", 0), ("linear_state", 0)],
    "window 1024": [("sliding_window", 1024)],
    "state": [("linear_state", 0)],
    "window 1024 + state": [("sliding_window", 1024), ("linear_state", 0)],
}


def value(block: Block) -> bytes:
    """The chain value of a block, an object of its own, as it comes off the wire."""
    return sha256(b"%d/%d" % (block.prompt, block.index)).digest()


def groups_of(order: dict[str, Any]) -> list[GroupInfo]:
    """The layout of a case."""
    size = order["block_tokens"]
    return [GroupInfo(kind, size, window, 1, 64) for kind, window in GROUPS[order["groups"]]]


def told(
    event: Event, groups: Sequence[GroupInfo], *, ends: bool = False, lacking: bool = False
) -> list[BlocksStored | BlocksRemoved]:
    """The same of every group.

    With ``ends`` each has only the blocks that a query at the end needs; ``lacking``: groups that
    do not need everything have not even the last one of these.
    """
    values = tuple(map(value, event.blocks))
    parent = value(event.parent) if event.parent is not None else None
    events: list[BlocksStored | BlocksRemoved] = []
    for number, group in enumerate(groups):
        if event.removed:
            events.append(BlocksRemoved(number, values))
            continue
        first, before, last = 0, parent, len(values)
        if ends:
            needed = KINDS[group.kind].first_needed(group, event.blocks[-1].index + 1)
            first = min(max(0, needed - event.blocks[0].index), len(values) - 1)
            before = values[first - 1] if first else parent
            last -= int(lacking and not sees_everything(group))
        if first < last:
            tokens = group.block_tokens
            events.append(BlocksStored(number, values[first:last], before, 0, tokens))
    return events


class Ours:
    """The index and its workers; see `benchmarks.index.turns.Side`."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._groups, self._ends = groups_of(order), order.get("ends", False)
        self._block_tokens = order["block_tokens"]
        self._index = PrefixIndex(self._groups, self._block_tokens)
        self._workers = [Incarnation(str(i), "1") for i in range(order["workers"])]
        for worker in self._workers:
            self._index.add(worker, 1 << 30)

    @property
    def num_held(self) -> int:
        """Of all workers, in all groups."""
        return sum(map(self._index.num_entries, self._workers))

    def take_in(self, event: Event) -> tuple[int, int]:
        """See `told`."""
        events = told(event, self._groups, ends=self._ends)
        worker = self._workers[event.worker]
        number = self._index.next_sequence(worker)
        start = time.process_time_ns()
        self._index.apply(worker, number, None, events)
        spent = time.process_time_ns() - start
        return sum(len(one.hashes) for one in events), spent

    def make(self, block: Block) -> bytes:
        """A chain value."""
        return value(block)

    def look_up(self, prompt: list[bytes]) -> tuple[dict[str, int], int, int]:
        """All levels; ``every_worker_ms``: and a dict of all workers."""
        start = time.process_time_ns()
        found = self._index.match(len(prompt) * self._block_tokens + 1, prompt)
        for _ in found.usable:
            pass
        answered = time.process_time_ns()
        tokens = found.usable.tokens
        taken = {"ms": answered - start, "every_worker_ms": time.process_time_ns() - start}
        return taken, sum(tokens.values()) // self._block_tokens, len(tokens)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    serve(order, lambda: Ours(order))
