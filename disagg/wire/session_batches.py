"""Several messages of a session in one of gRPC's: each of those costs more than what is in it.

Only for who said that it takes them (`SessionOpen`, `WorkerInfo`); others would lose all but the
first. What waits at the moment of a write goes together, nothing waits for more.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import TypeVar

from disagg.wire.checks import malformed
from disagg.wire.v1 import session_pb2

MESSAGES_MAX = 64
"""In one write; those behind them have their turn after it."""
BYTES_MAX = 1 << 20
"""A message that would make a batch larger begins the next one."""

_Item = TypeVar("_Item")
_Wire = TypeVar("_Wire", session_pb2.SessionRequest, session_pb2.SessionResponse)


async def take(queue: "asyncio.Queue[_Item]", num_max: int) -> list[_Item]:
    """Wait for one item; returns it with those behind it. None is the last one that is taken."""
    taken = [await queue.get()]
    while len(taken) < num_max and taken[-1] is not None and not queue.empty():
        taken.append(queue.get_nowait())
    return taken


def batched(wires: Iterable[_Wire]) -> Iterator[_Wire]:
    """Join encoded messages, in their order, to as few as ``BYTES_MAX`` lets be."""
    batch, num_bytes = None, 0
    for wire in wires:
        if batch is None:
            batch = wire
            continue
        # To learn a size is to encode: a long prompt alone, as most are, is not encoded twice.
        num_bytes = num_bytes or batch.ByteSize()
        size = wire.ByteSize()
        if num_bytes + size <= BYTES_MAX:
            batch.more.append(wire)
            num_bytes += size
        else:
            yield batch
            batch, num_bytes = wire, size
    if batch is not None:
        yield batch


def unbatched(wire: _Wire) -> Iterator[_Wire]:
    """The messages of a batch, or the only one.

    Raises:
        ProtocolError: one of a batch is a batch.
    """
    yield wire
    for one in wire.more:
        if one.more:
            raise malformed(wire, "more", "has messages that have more themselves")
        yield one
