"""A worker that stops while it computes, and streams whose other end is gone."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest
from opentelemetry.trace import NoOpTracer

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Ended, PeerMessage, Reserve
from disagg.messages.registration import Contract
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.scheduling.step import Step, StepResult
from disagg.tls.connections import Connections
from disagg.wire.stream_hello import PeerHello
from disagg.wire.v1 import peer_pb2, worker_pb2_grpc
from disagg.workers.control import Control
from disagg.workers.peer_links import GrpcPeerLinks
from disagg.workers.request_trace import RequestTrace
from tests.unit.workers.test_sessions import NoPeers, new_core

BOUND_S = 60.0
LOCAL = Submit(RequestKey("r", 1), Role.LOCAL, (5, 6), (), b"", SamplingParams(max_tokens=4))


class SlowEngine:
    """Computes when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_steps = 0

    def prepare(self, step: Step) -> None:
        pass

    def run(self, step: Step) -> StepResult:
        self.num_steps += 1
        assert self.go.wait(BOUND_S)
        return StepResult(step.step_id, tuple(SampledToken(7) for _ in step.slices))


async def until(state: Callable[[], bool]) -> None:
    """Let others run until it is so; what changes it is partly on other threads."""
    async with asyncio.timeout(BOUND_S):
        while not state():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def failures_of_a_stop(*, goes_on: bool) -> list[str]:
    """What a control says has failed that is stopped during a step of a sequence that needs more.

    Args:
        goes_on: as it was once: what happens while it stops is still listened to.
    """
    failures: list[str] = []
    engine, links = SlowEngine(), cast(Any, NoPeers())
    control = Control(new_core(), engine, links, failures.append, RequestTrace(NoOpTracer()))
    control.start(links)
    control.router_message(LOCAL)
    await until(lambda: engine.num_steps > 0)
    stopping = asyncio.create_task(control.stop())
    await until(lambda: control._ended)
    control._ended = not goes_on
    await until(lambda: control._engine._running._shutdown)
    engine.go.set()
    await stopping
    if goes_on:
        await until(lambda: bool(failures))
    assert engine.num_steps == 1
    return failures


def test_a_stop_during_a_step_is_no_failure() -> None:
    assert asyncio.run(failures_of_a_stop(goes_on=False)) == []


def test_control_a_step_after_the_stop_would_be_one() -> None:
    (said,) = asyncio.run(failures_of_a_stop(goes_on=True))
    assert "cannot schedule new futures after shutdown" in said


class Leaves(worker_pb2_grpc.WorkerServicer):
    """A peer that ends the stream after the first message."""

    async def Peer(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[peer_pb2.PeerEnvelope]:
        await anext(request_iterator)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield peer_pb2.PeerEnvelope()


HELLO = PeerHello(Contract("f", "float32", (), "pages", 1, 1, "h", 1, 1), "127.0.0.1:1", ())
ME, PEER = Incarnation("me", "M"), Incarnation("peer", "P")


async def tasks_left(*, by_generator: bool) -> int:
    """Tasks that wait for ever after the peer has left."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(cast(Any, Leaves)(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    before = asyncio.all_tasks()
    lost = asyncio.Event()
    if by_generator:

        async def messages() -> AsyncIterator[peer_pb2.PeerEnvelope]:
            yield peer_pb2.PeerEnvelope()
            await asyncio.Event().wait()

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Peer(messages())
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
    else:
        links = GrpcPeerLinks(ME, HELLO, _nothing, _nothing, lambda _: lost.set(), Connections(""))
        links.connect(PEER, f"127.0.0.1:{port}")
        async with asyncio.timeout(BOUND_S):
            await lost.wait()
    await server.stop(0)
    left: set[asyncio.Task[Any]] = set()
    for _ in range(100):  # what only has to hear of it ends by then
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
    num_left = sum("_consume_request_iterator" in repr(task) for task in left)
    for task in left:
        task.cancel()
    return num_left


def _nothing(*_: object) -> None:
    pass


class Stays(worker_pb2_grpc.WorkerServicer):
    """A peer that listens for ever."""

    async def Peer(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[peer_pb2.PeerEnvelope]:
        async for _ in request_iterator:
            pass
        yield peer_pb2.PeerEnvelope()


async def lose_by_sending(message: PeerMessage) -> bool:
    """Whether the peer counts as lost once this and a good message were sent."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(cast(Any, Stays)(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    lost = asyncio.Event()
    links = GrpcPeerLinks(ME, HELLO, _nothing, _nothing, lambda _: lost.set(), Connections(""))
    links.connect(PEER, f"127.0.0.1:{port}")
    links.send(PEER, message)
    links.send(PEER, Ended(RequestKey("r", 1), "over"))
    async with asyncio.timeout(BOUND_S):
        while not lost.is_set() and links._links[PEER].queue.qsize():
            await asyncio.wait((asyncio.create_task(lost.wait()),), timeout=0.01)
    await links.close()
    await server.stop(0)
    return lost.is_set()


def test_a_stream_that_cannot_be_written_to_is_lost() -> None:
    """A message that no codec takes ends the writer; what follows would wait for ever."""
    assert asyncio.run(lose_by_sending(Reserve(RequestKey("r", 1), -1)))


def test_control_a_message_like_others_loses_nobody() -> None:
    assert not asyncio.run(lose_by_sending(Reserve(RequestKey("r", 1), 1)))


def test_nothing_waits_for_a_peer_that_is_gone() -> None:
    assert asyncio.run(tasks_left(by_generator=False)) == 0


def test_control_a_generator_would_stay_behind() -> None:
    assert asyncio.run(tasks_left(by_generator=True)) == 1
