"""Routers that come late, or come and go: what they learn, and what they leave at a worker."""

import asyncio
from typing import Any

from disagg.messages.kv_events import BlocksRemoved, KVSnapshot
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


async def snapshot_of_a_long_log(core: WorkerCore) -> Any:
    while core.kv.events.since(0) is not None:  # what was first is dropped
        core.kv.events.append(BlocksRemoved(0, (b"long gone",)))
    async with serving(core) as (stub, _):
        call = stub.KvEvents(kv_events_pb2.KvEventsRequest(from_sequence=0))
        async with asyncio.timeout(TIMEOUT_S):
            wire = await call.read()
        call.cancel()
        return kv_batch_from_wire(wire)[1]


def test_a_router_that_comes_late_has_the_whole_picture() -> None:
    core = core_with()
    serve(core, "a", range(16))
    cached = core.kv.pool.cache.values()
    assert any(cached)
    snapshot = asyncio.run(snapshot_of_a_long_log(core))
    assert isinstance(snapshot, KVSnapshot)
    assert snapshot.next_seq == core.kv.events.next_seq
    assert snapshot.hashes == tuple(hashes for hashes in cached if hashes)


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
