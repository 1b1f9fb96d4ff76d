"""KV events that come shortly after others are sent together, and none is lost by that."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from disagg.kv.event_log import WAITING_EVENTS_MAX, KVEventLog
from disagg.messages.kv_events import BlocksStored, KVEventBatch, KVSnapshot
from disagg.workers.kv_event_stream import follow

BOUND_S = 30.0
LONG_MS = 600_000


class Worker:
    """Its events, and who is told of them."""

    def __init__(self, events_max: int = 4096) -> None:
        self.log = KVEventLog(lambda: ((),), 1, events_max)
        self.changed = asyncio.Event()

    def stores(self, num: int = 1) -> None:
        for _ in range(num):
            self.log.append(BlocksStored(0, (b"%032d" % self.log.next_seq,), None, 0, 16))
        self.changed.set()
        self.changed = asyncio.Event()

    def follow(self, pace_ms: int) -> AsyncIterator[KVEventBatch | KVSnapshot]:
        return follow(self.log, 0, lambda: self.changed, lambda: pace_ms)


async def batch_of(stream: AsyncIterator[Any], num: int) -> int:
    """The next one has so many events; number of its first one."""
    async with asyncio.timeout(BOUND_S):
        batch = await anext(stream)
    assert isinstance(batch, KVEventBatch)
    assert len(batch.events) == num
    return batch.first_seq


async def few_wait_many_do_not() -> None:
    worker = Worker()
    stream = worker.follow(LONG_MS)
    worker.stores()
    assert await batch_of(stream, 1) == 0, "the first one goes at once"
    after = asyncio.ensure_future(batch_of(stream, WAITING_EVENTS_MAX))
    for _ in range(WAITING_EVENTS_MAX - 1):
        worker.stores()
        await asyncio.sleep(0)
    assert not after.done(), "they wait for each other"
    worker.stores()
    assert await after == 1, "before the log would lose them"


async def each_goes_at_once() -> None:
    worker = Worker()
    stream = worker.follow(0)
    for number in range(5):
        worker.stores()
        assert await batch_of(stream, 1) == number
    after = asyncio.ensure_future(batch_of(stream, 1))
    await asyncio.sleep(0)
    worker.changed.set()  # something else than KV
    worker.changed = asyncio.Event()
    await asyncio.sleep(0)
    worker.stores()
    assert await after == 5


async def what_the_log_has_lost_comes_as_a_snapshot() -> None:
    worker = Worker(events_max=8)
    stream = worker.follow(LONG_MS)
    worker.stores(9)
    async with asyncio.timeout(BOUND_S):
        snapshot = await anext(stream)
    assert isinstance(snapshot, KVSnapshot)
    assert snapshot.next_seq == 9
    worker.stores(2)
    assert await batch_of(stream, 2) == 9


def test_few_events_wait_for_each_other_and_many_do_not() -> None:
    asyncio.run(few_wait_many_do_not())


def test_without_a_pace_each_goes_at_once() -> None:
    asyncio.run(each_goes_at_once())


def test_what_the_log_has_lost_comes_as_a_snapshot() -> None:
    asyncio.run(what_the_log_has_lost_comes_as_a_snapshot())
