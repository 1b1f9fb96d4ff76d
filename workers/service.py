"""The worker's gRPC service: the router's session, KV events, peers' streams, status."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import grpc

from disagg.errors import CapacityError, ProtocolError
from disagg.messages.identity import Incarnation
from disagg.messages.session import ToRouterMessage
from disagg.scheduling.stats import worker_stats
from disagg.wire.identity_codec import incarnation_to_wire, key_to_wire
from disagg.wire.kv_events_codec import kv_batch_to_wire
from disagg.wire.session_batches import MESSAGES_MAX, batched, take, unbatched
from disagg.wire.session_codec import (
    session_request_from_wire,
    session_response_to_wire,
)
from disagg.wire.stats_codec import stats_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import kv_events_pb2, peer_pb2, session_pb2, worker_pb2, worker_pb2_grpc
from disagg.workers.control import Control
from disagg.workers.kv_event_stream import follow
from disagg.workers.peer_links import GrpcPeerLinks

log = logging.getLogger(__name__)

SESSION_QUEUE_MAX = 65_536
"""Messages waiting for the router; a router so slow loses its session."""


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Thin translation between streams and the control."""

    def __init__(
        self, me: Incarnation, role: Callable[[], str], control: Control, links: GrpcPeerLinks
    ) -> None:
        self._me = me
        self._role = role
        self._control = control
        self._links = links
        self._version = version("disagg")

    async def Session(
        self,
        request_iterator: AsyncIterator[session_pb2.SessionRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        """One router's ordered stream; its end cancels what it started, and no other router's."""
        opening = await anext(aiter(request_iterator), None)
        opened = None if opening is None else session_request_from_wire(opening)
        if not isinstance(opened, SessionOpen) or opened.worker != self._me:
            wanted = opened.worker if isinstance(opened, SessionOpen) else "opened by a SessionOpen"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"this is {self._me}, not {wanted}"
            )
        router = opened.router_id
        queue: asyncio.Queue[ToRouterMessage | None] = asyncio.Queue(SESSION_QUEUE_MAX)
        handler = asyncio.current_task()
        assert handler is not None
        replaced = ""

        def send(message: ToRouterMessage) -> None:
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                handler.cancel()

        def end(reason: str) -> None:
            nonlocal replaced
            replaced = reason
            while not queue.empty():  # of requests that have just ended here
                queue.get_nowait()
            queue.put_nowait(None)

        try:
            self._control.open_session(send, end, router)
        except CapacityError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        reading = asyncio.create_task(self._read_session(request_iterator, router, send, queue))
        try:
            num_max = MESSAGES_MAX if opened.takes_batches else 1
            is_over = False
            while not is_over:
                taken = await take(queue, num_max)
                is_over = taken[-1] is None
                for response in batched(session_response_to_wire(one) for one in taken if one):
                    yield response
            if replaced:
                await context.abort(grpc.StatusCode.ABORTED, replaced)
            await reading
        except ProtocolError as error:
            log.error("session of router %s: %s", router, error.message)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        finally:
            reading.cancel()
            self._control.close_session(send, router)

    async def _read_session(
        self,
        requests: AsyncIterator[session_pb2.SessionRequest],
        router: str,
        send: Callable[[ToRouterMessage], None],
        queue: asyncio.Queue[ToRouterMessage | None],
    ) -> None:
        try:
            async for request in requests:
                for one in unbatched(request):
                    message = session_request_from_wire(one, router)
                    if isinstance(message, SessionOpen):
                        raise ProtocolError("a session is opened once")
                    if not self._control.in_session(send, router):
                        return  # A late submit would wait for ever: nobody knows of it any more.
                    self._control.router_message(message)
        finally:
            # A full queue is already being torn down.
            if not queue.full():
                queue.put_nowait(None)

    async def KvEvents(
        self,
        request: kv_events_pb2.KvEventsRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[kv_events_pb2.KvEventBatch]:
        """See `follow`."""
        control = self._control
        batches = follow(
            control.core.kv.events,
            int(request.from_sequence),
            lambda: control.changed,
            control.report_pace_ms,
        )
        async for batch in batches:
            yield kv_batch_to_wire(self._me.epoch, batch)

    async def Peer(
        self,
        request_iterator: AsyncIterator[peer_pb2.PeerEnvelope],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[peer_pb2.PeerEnvelope]:
        """Another worker's messages to this one."""
        async for answer in self._links.serve(request_iterator, context):
            yield answer

    async def Status(
        self, request: worker_pb2.StatusRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.StatusResponse:
        """Pools, holders, leases and inbound transfers at this moment."""
        core = self._control.core
        return worker_pb2.StatusResponse(
            worker=incarnation_to_wire(self._me),
            role=self._role(),
            pid=os.getpid(),
            stats=stats_to_wire(worker_stats(core)),
            holders=[
                worker_pb2.HeldBlocks(holder=str(holder), num_blocks=len(blocks))
                for holder, blocks in core.kv.pool.holders().items()
            ],
            leases=[
                worker_pb2.LeaseStatus(
                    lease_id=lease.lease_id,
                    key=key_to_wire(lease.key),
                    reader=incarnation_to_wire(lease.reader),
                    state=lease.state,
                    num_blocks=lease.num_blocks,
                )
                for lease in core.leases.statuses()
            ],
            inbound=[
                worker_pb2.InboundStatus(
                    key=key_to_wire(entry.key),
                    owner=incarnation_to_wire(entry.owner),
                    state=entry.state,
                    num_blocks=entry.num_blocks,
                    num_reads_in_progress=entry.num_reads_in_progress,
                )
                for entry in core.inbound.statuses()
            ],
            kv_sequence=core.kv.events.next_seq,
            groups=[
                worker_pb2.GroupBlocks(num_held=group.num_held, num_cached=group.num_cached)
                for group in core.kv.tables.count_blocks(core.kv.pool.cache)
            ],
            version=self._version,
        )
