"""When a router has a worker: it has registered it, and has a session with it."""

import asyncio
from typing import Any, cast

import grpc

from disagg.wire.session_codec import session_request_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import worker_pb2_grpc
from disagg.workers.actor import why_unregistered
from disagg.workers.worker import Worker
from tests.unit.workers.test_router_discovery import router_at, until
from tests.unit.workers.test_worker_ports import worker


async def open_session(started: Worker) -> None:
    """As a router does, and end it."""
    async with grpc.aio.insecure_channel(started.address) as channel:
        session = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Session()
        await session.write(session_request_to_wire(SessionOpen("router", started.incarnation)))
        await until(lambda: not why_unregistered(started.registrations), "a session is open")
        session.cancel()


def test_one_that_no_router_can_dial_is_not_known() -> None:
    """The port may be closed to routers: the next worker must not be replaced then."""

    async def play() -> None:
        async with router_at("127.0.0.1") as (router, port):
            started = worker(router_addresses=(f"127.0.0.1:{port}",), heartbeat_ms=20)
            await asyncio.to_thread(started.start)
            try:
                await until(lambda: router.num_registered > 1, "it was registered, and answered")
                undialled = (
                    f"router 127.0.0.1:{port}: registered, "
                    f"but it has not connected to {started.address}"
                )
                assert why_unregistered(started.registrations) == undialled
                await open_session(started)
                await until(
                    lambda: why_unregistered(started.registrations) == undialled, "it has ended"
                )
            finally:
                assert await asyncio.to_thread(started.stop)

    asyncio.run(play())
