"""Streams between workers: each dials the other and sends on its own stream.

A stream's first message is a hello with contract, transport metadata and pool geometry. The end
of either stream counts as the peer's abort.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc

from disagg.errors import ProtocolError
from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage, WrongEpoch
from disagg.tls.connections import Connections
from disagg.wire.peer_codec import peer_from_wire, peer_to_wire
from disagg.wire.stream_hello import PeerHello
from disagg.wire.v1 import peer_pb2
from disagg.wire.v1.worker_pb2_grpc import WorkerStub
from disagg.workers.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from disagg.wire.v1.worker_pb2_grpc import WorkerAsyncStub  # only in the stub file

log = logging.getLogger(__name__)

QUEUE_MAX = 65_536
"""Messages waiting for one peer; a peer so slow is given up."""

Envelopes = AsyncIterator[peer_pb2.PeerEnvelope]
PeerCall: TypeAlias = "grpc.aio.StreamStreamCall[peer_pb2.PeerEnvelope, peer_pb2.PeerEnvelope]"


class _Link:
    """The stream this worker opened to one peer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.queue: asyncio.Queue[PeerMessage] = asyncio.Queue(QUEUE_MAX)
        self.task: asyncio.Task[None] | None = None


class GrpcPeerLinks:
    """Outgoing and incoming peer streams of one worker.

    Args:
        me: this incarnation.
        hello: the first message of every stream.
        on_hello: called with a peer's hello, before any of its messages.
        on_message: a message arrived.
        on_lost: a stream to or from the peer ended; called once per loss.
        connections: what dials; a hello is sent to nobody who has not shown the cluster's
            certificate, where there are certificates.
    """

    def __init__(
        self,
        me: Incarnation,
        hello: PeerHello,
        on_hello: Callable[[Incarnation, PeerHello], None],
        on_message: Callable[[Incarnation, PeerMessage], None],
        on_lost: Callable[[Incarnation], None],
        connections: Connections,
    ) -> None:
        self._me = me
        self._hello = hello
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._connections = connections
        self._links: dict[Incarnation, _Link] = {}
        self._incoming: dict[Incarnation, object] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def connect(self, peer: Incarnation, address: str) -> None:
        """Dial the peer unless there is a stream to it already."""
        if peer in self._links:
            return
        link = self._links[peer] = _Link(address)
        link.task = asyncio.create_task(self._run(peer, link))

    def send(self, peer: Incarnation, message: PeerMessage) -> None:
        """Queue a message for the peer; without a stream it is lost."""
        link = self._links.get(peer)
        if link is None:
            return
        try:
            link.queue.put_nowait(message)
        except asyncio.QueueFull:
            self._lost(peer, "its queue is full")

    async def serve(
        self, requests: Envelopes, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> Envelopes:
        """Handle one incoming stream until it ends; answers only a wrong epoch."""
        sender: Incarnation | None = None
        stream = object()
        try:
            async for envelope in requests:
                who, addressee_epoch, body = peer_from_wire(envelope)
                if addressee_epoch != self._me.epoch:
                    yield peer_to_wire(self._me, who.epoch, WrongEpoch(self._me.epoch))
                    return
                if isinstance(body, PeerHello):
                    ours = self._hello.contract
                    if why := ours.refusal(str(self._me), body.contract, str(who)):
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
                    if who in self._incoming:
                        self._lost(who, "it dialled anew")
                    sender = who
                    self._incoming[who] = stream
                    self._on_hello(who, body)
                    # Answers travel on our own stream to the sender.
                    self.connect(who, body.address)
                elif who != sender:
                    raise ProtocolError(f"{who} sent {type(body).__name__} before its hello")
                elif self._incoming.get(who) is not stream:
                    return  # lost in between; the peer notices the stream's end
                else:
                    self._on_message(who, body)
        except ProtocolError as error:
            log.error("peer stream from %s: %s", sender, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        finally:
            if sender is not None and self._incoming.get(sender) is stream:
                self._lost(sender, "its stream ended")

    async def close(self) -> None:
        """End every outgoing stream."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    async def _run(self, peer: Incarnation, link: _Link) -> None:
        reason = "the stream ended"
        try:
            async with self._connections.channel(link.address, CHANNEL_OPTIONS) as channel:
                call = cast("WorkerAsyncStub", WorkerStub(channel)).Peer(None)
                # A generator given to gRPC would stay behind, pending, when the peer ends.
                writing = asyncio.create_task(self._write(call, peer, link))
                try:
                    async for answer in call:
                        _, _, body = peer_from_wire(answer)
                        reason = f"it answered {body}"
                finally:
                    writing.cancel()
                    await asyncio.gather(writing, return_exceptions=True)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except ProtocolError as error:
            reason = error.message
        if self._links.get(peer) is link:
            self._lost(peer, reason)

    async def _write(self, call: PeerCall, peer: Incarnation, link: _Link) -> None:
        """Send what is queued until the stream ends; the task that reads it reports why."""
        try:
            await call.write(peer_to_wire(self._me, peer.epoch, self._hello))
            while True:
                message = await link.queue.get()
                await call.write(peer_to_wire(self._me, peer.epoch, message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except Exception as error:  # a stream that nobody writes to must not look well
            log.exception("writing to %s failed", peer)
            if self._links.get(peer) is link:
                self._lost(peer, repr(error))

    def _lost(self, peer: Incarnation, reason: str) -> None:
        link = self._links.pop(peer, None)
        stream = self._incoming.pop(peer, None)
        if link is None and stream is None:
            return
        if link is not None and link.task is not None and link.task is not asyncio.current_task():
            # Kept until it is done: asyncio holds tasks weakly.
            self._closing.add(link.task)
            link.task.add_done_callback(self._closing.discard)
            link.task.cancel()
        log.warning("lost %s of epoch %s: %s", peer.worker_id, peer.epoch, reason)
        self._on_lost(peer)
