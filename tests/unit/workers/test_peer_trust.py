"""Where the KV lies is told to peers that have proven who they are, and to nobody else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract
from disagg.tls.connections import SERVER_NAME, Connections
from disagg.wire.peer_codec import peer_from_wire, peer_to_wire
from disagg.wire.stream_hello import PeerHello, PoolInfo
from disagg.wire.v1 import peer_pb2, worker_pb2_grpc
from disagg.workers.peer_links import GrpcPeerLinks
from tests.unit.tls.strangers import Caller, create, node_of, strangers

ME, PEER = Incarnation("me", "A"), Incarnation("peer", "B")
SECRET = b"where the pool lies"
CONTRACT = Contract("model", "float32", ("full",), "pages", 1024, 16, "sha256", 1, 1)
POOLS = (PoolInfo(SECRET, 1 << 40, 8, 1024, "DRAM", 0),)
BOUND_S = 60


class Wire:
    """A port that keeps every byte that comes; it answers what a server of gRPC would first."""

    def __init__(self) -> None:
        self.received = b""
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\4\0\0\0\0\0")  # HTTP/2's empty settings
        with contextlib.suppress(OSError):
            while some := await reader.read(65536):
                self.received += some
        writer.close()
        self.ended.set()


def links_of(connections: Connections, lost: asyncio.Event, greeted: list[Any]) -> GrpcPeerLinks:
    return GrpcPeerLinks(
        ME,
        PeerHello(CONTRACT, "127.0.0.1:1", POOLS),
        on_hello=lambda who, _: greeted.append(who),
        on_message=lambda *_: None,
        on_lost=lambda _: lost.set(),
        connections=connections,
    )


@pytest.mark.parametrize("secured", [True, False])
async def test_whoever_only_listens_gets_no_hello(tmp_path: Path, secured: bool) -> None:
    wire, lost = Wire(), asyncio.Event()
    listening = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    links = links_of(Connections(str(create(tmp_path)) if secured else ""), lost, [])
    links.connect(PEER, f"127.0.0.1:{port}")
    async with asyncio.timeout(BOUND_S):
        if secured:
            await lost.wait()
        else:  # control: this is how it would be read off the wire
            while SECRET not in wire.received:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # bytes that come tell nobody
    assert wire.received
    assert (SECRET in wire.received) is not secured
    await links.close()
    listening.close()


class Listener(worker_pb2_grpc.WorkerServicer):
    """A peer that notes the hellos it gets."""

    def __init__(self) -> None:
        self.hellos: list[PeerHello] = []

    async def Peer(
        self, request_iterator: AsyncIterator[peer_pb2.PeerEnvelope], context: Any
    ) -> AsyncIterator[peer_pb2.PeerEnvelope]:
        async for envelope in request_iterator:
            _, _, body = peer_from_wire(envelope)
            assert isinstance(body, PeerHello)
            self.hellos.append(body)
            return
        yield peer_pb2.PeerEnvelope()


@pytest.mark.parametrize("theirs", ["ours", "another cluster's", "none"])
async def test_a_peer_is_greeted_if_its_certificate_is_the_clusters(
    tmp_path: Path, theirs: str
) -> None:
    ours = Connections(str(create(tmp_path / "ours")))
    other = Connections("" if theirs == "none" else str(create(tmp_path / "other")))
    connections = ours if theirs == "ours" else other
    listener, lost = cast(Any, Listener)(), asyncio.Event()
    server = connections.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(listener, server)
    port = connections.listen(server, "127.0.0.1:0")
    await server.start()
    links = links_of(ours, lost, [])
    links.connect(PEER, f"127.0.0.1:{port}")
    async with asyncio.timeout(BOUND_S):
        await lost.wait()
    told = [pool.transport_metadata for hello in listener.hellos for pool in hello.pools]
    assert told == ([SECRET] if theirs == "ours" else [])
    await links.close()
    await server.stop(0)


class Service(worker_pb2_grpc.WorkerServicer):
    """A worker's `Peer` method alone."""

    def __init__(self, links: GrpcPeerLinks) -> None:
        self.links = links

    async def Peer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in self.links.serve(request_iterator, context):
            yield answer


async def greet(directory: Path, caller: Caller) -> tuple[list[Incarnation], bytes]:
    """Say hello from a listening port; whose hello was taken, and what came to that port."""
    wire = Wire()
    listening = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    back = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    greeted: list[Incarnation] = []
    connections = Connections(str(create(directory)))
    links = links_of(connections, asyncio.Event(), greeted)
    server = connections.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(cast(Any, Service)(links), server)
    port = connections.listen(server, "127.0.0.1:0")
    await server.start()
    hello = peer_to_wire(PEER, ME.epoch, PeerHello(CONTRACT, back, POOLS))

    async def messages() -> AsyncIterator[peer_pb2.PeerEnvelope]:
        yield hello
        while not greeted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the callback tells nobody

    if not caller.trusts:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    else:
        credentials = grpc.ssl_channel_credentials(caller.trusts, caller.key, caller.certificate)
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=SERVER_NAME)
    async with channel:
        call = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Peer(messages(), timeout=20)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
    await links.close()
    await server.stop(0)
    listening.close()
    return greeted, wire.received


@pytest.mark.parametrize(
    "kind", ["no TLS", "no certificate", "another authority's", "an expired one"]
)
async def test_a_strangers_hello_is_not_taken_and_not_returned(tmp_path: Path, kind: str) -> None:
    create(tmp_path)
    assert await greet(tmp_path, strangers(tmp_path)[kind]) == ([], b"")


async def test_a_nodes_hello_is_taken(tmp_path: Path) -> None:
    """Control; where it asks to be dialled, even a node that cannot prove it is told nothing."""
    create(tmp_path)
    greeted, received = await greet(tmp_path, node_of(tmp_path))
    assert greeted == [PEER]
    assert SECRET not in received
