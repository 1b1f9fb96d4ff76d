"""Routers that come late, or come and go: what they learn, and what they leave at a worker."""

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest

from disagg.messages import kv_events
from disagg.messages.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
    KVSnapshot,
    TierCleared,
    TierStored,
)
from disagg.messages.session import Claim
from disagg.scheduling.core import WorkerCore
from disagg.wire.kv_events_codec import kv_batch_from_wire
from disagg.wire.v1 import kv_events_pb2
from tests.unit.scheduling.test_cache_reset import core_with, serve
from tests.unit.workers.test_sessions import (
    OTHER,
    TIMEOUT_S,
    Session,
    key_of,
    new_core,
    serving,
    submit,
)


async def snapshot_of_a_long_log(core: WorkerCore) -> list[Any]:
    while core.kv.events.since(0) is not None:  # what was first is dropped
        core.kv.events.append(BlocksRemoved(0, (b"long gone",)))
    async with serving(core) as (stub, _):
        call = stub.KvEvents(kv_events_pb2.KvEventsRequest(from_sequence=0))
        async with asyncio.timeout(TIMEOUT_S):
            parts: list[Any] = [kv_batch_from_wire(await call.read())[1]]
            while not parts[-1].part.is_last:
                parts.append(kv_batch_from_wire(await call.read())[1])
        call.cancel()
        return parts


def test_a_router_that_comes_late_has_the_whole_picture() -> None:
    core = core_with()
    serve(core, "a", range(16))
    cached = core.kv.pool.cache.values()
    assert any(cached)
    (snapshot,) = asyncio.run(snapshot_of_a_long_log(core))
    assert isinstance(snapshot, KVSnapshot)
    assert snapshot.next_seq == core.kv.events.next_seq
    assert snapshot.hashes == tuple(hashes for hashes in cached if hashes)


def test_a_large_picture_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a bounded size: whoever takes one in does nothing else meanwhile."""
    monkeypatch.setattr(kv_events, "PART_HASHES_MAX", 2)
    core = core_with()
    serve(core, "a", range(16))
    stored = TierStored(0, 0, tuple(bytes([number]) * 32 for number in range(5)))
    core.kv.events.read_tiers = lambda: (stored,)
    cached = [hashes for hashes in core.kv.pool.cache.values() if hashes]
    parts = asyncio.run(snapshot_of_a_long_log(core))
    assert [one.part.number for one in parts] == list(range(len(parts)))
    sizes = [sum(map(len, one.hashes)) + sum(len(t.hashes) for t in one.tiers) for one in parts]
    assert max(sizes) == 2
    assert sum(sizes) == sum(map(len, cached)) + 5
    for group, hashes in enumerate(cached):
        assert tuple(h for one in parts for h in one.hashes[group]) == hashes
    assert tuple(h for one in parts for t in one.tiers for h in t.hashes) == stored.hashes


async def batches_of(core: WorkerCore, num_events: int) -> list[KVEventBatch]:
    async with serving(core) as (stub, _):
        call = stub.KvEvents(kv_events_pb2.KvEventsRequest(from_sequence=0))
        found: list[KVEventBatch] = []
        async with asyncio.timeout(TIMEOUT_S):
            while sum(len(one.events) for one in found) < num_events:
                batch = kv_batch_from_wire(await call.read())[1]
                assert isinstance(batch, KVEventBatch)
                found.append(batch)
        call.cancel()
        return found


def test_many_events_come_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    core, chance = core_with(), random.Random(1)
    told: list[KVEvent] = []
    for number in range(60):
        values = tuple(bytes([number, i]) * 16 for i in range(chance.choice((1, 3, 9))))
        event = BlocksStored(0, values, None, 0, 4)
        told.append(chance.choice((event, TierStored(0, 0, values), AllCleared(), TierCleared(0))))
        core.kv.events.append(told[-1])
    (whole,) = asyncio.run(batches_of(core, len(told)))
    assert list(whole.events) == told, "control: they are few"
    monkeypatch.setattr(kv_events, "PART_HASHES_MAX", 6)
    found = asyncio.run(batches_of(core, len(told)))
    assert [event for one in found for event in one.events] == told
    for one, after in pairwise(found):
        assert one.next_seq == after.first_seq
        num_hashes = sum(len(getattr(event, "hashes", ())) for event in one.events)
        assert num_hashes <= 6 or len(one.events) == 1
    assert len(found) > 10


NUM_LIVES = 100


async def left_by_routers_that_come_and_go(*, forgets: bool) -> dict[str, int]:
    """What a worker has after so many routers were there with a request, beside one that stays."""
    core = new_core()
    async with serving(core) as (stub, control):
        if not forgets:
            core._claims.router_lost = lambda router: None  # type: ignore[method-assign]
        stays = Session(stub, OTHER)
        stays.tell(Claim(key_of("stays", OTHER), b"s" * 16, 1))
        assert await stays.hears()
        num_tasks = len(asyncio.all_tasks())
        for life in range(NUM_LIVES):
            router = f"life:{life}"
            session = Session(stub, router)
            session.tell(Claim(key_of("r", router), life.to_bytes(16, "big"), 1))
            session.tell(submit("r"))
            events = stub.KvEvents(kv_events_pb2.KvEventsRequest(from_sequence=0))
            reading = asyncio.create_task(events.read())
            async with asyncio.timeout(TIMEOUT_S):
                while key_of("r", router) not in core.sequences:
                    await control.changed.wait()
                session._call.cancel()
                events.cancel()
                while router in control._sessions._sessions:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)  # its end tells nobody
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(TIMEOUT_S):
            while len(asyncio.all_tasks()) > num_tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return {
            "sessions": len(control._sessions._sessions),
            "claims": len(core._claims),
            "generations": len(core.sequences),
        }


def test_routers_that_come_and_go_leave_nothing() -> None:
    left = asyncio.run(left_by_routers_that_come_and_go(forgets=True))
    assert left == {"sessions": 1, "claims": 1, "generations": 0}


def test_control_claims_that_are_not_forgotten_are_left() -> None:
    left = asyncio.run(left_by_routers_that_come_and_go(forgets=False))
    assert left == {"sessions": 1, "claims": 1 + NUM_LIVES, "generations": 0}
