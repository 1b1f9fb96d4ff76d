"""The router's streams to one incarnation of a worker: the session and the KV events."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import grpc

from disagg.errors import ProtocolError, RemoteFault
from disagg.messages.kv_events import BlocksStored, KVEvent, KVEventBatch, KVSnapshot
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import ToRouterMessage, ToWorkerMessage
from disagg.tls.connections import Connections
from disagg.wire.kv_events_codec import kv_batch_from_wire
from disagg.wire.session_batches import MESSAGES_MAX, batched, take, unbatched
from disagg.wire.session_codec import session_request_to_wire, session_response_from_wire
from disagg.wire.session_encoder import SessionEncoder
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import kv_events_pb2, session_pb2, worker_pb2
from disagg.wire.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from disagg.wire.v1.worker_pb2_grpc import WorkerAsyncStub  # only in the stub file

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 64 << 20
CONNECT_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 1.0
KV_RETRY_MIN_S = 0.05
KV_RETRY_MAX_S = 2.0
SessionCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[session_pb2.SessionRequest, session_pb2.SessionResponse]"
)
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # a new incarnation never inherits old back-off
)


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """Events of a session for its owner; all called on the event loop."""

    up: Callable[[], None]
    message: Callable[[ToRouterMessage], None]
    lost: Callable[[str], None]
    """Once, with the reason; never after `WorkerSession.close`."""
    kv_sequence: Callable[[], int]
    kv_batch: Callable[[str, KVEventBatch | KVSnapshot], bool]
    """False: a gap; the stream is opened anew."""
    failed: Callable[[str], None]
    """An exception in ``session`` or ``kv_events``, already logged."""
    broken: Callable[[], None]
    """Not even the loss could be reported: the router cannot go on."""


class WorkerSession:
    """Dials a worker at once and reports until it is lost or closed. It never reconnects.

    Args:
        outgoing_max: messages that may wait for the worker; one more and it is lost.
        connections: what dials.
        encoder: of the sessions with all workers.

    Attributes:
        heard: the worker has sent something: it has not refused the session.
    """

    def __init__(
        self,
        router_id: str,
        info: WorkerInfo,
        events: SessionEvents,
        outgoing_max: int,
        connections: Connections,
        encoder: SessionEncoder,
    ) -> None:
        self.info = info
        self.heard = False
        self._router_id = router_id
        self._events = events
        self._connections = connections
        self._encoder = encoder
        self._outgoing: asyncio.Queue[session_pb2.SessionRequest] = asyncio.Queue(outgoing_max)
        self._closed = False
        self._stub: WorkerAsyncStub | None = None
        self._unsent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why a message could not even be queued."""
        self._task = asyncio.create_task(self._run(), name=f"session {info.incarnation.worker_id}")

    def send(self, message: ToWorkerMessage) -> None:
        """Queue a message behind those before it; where that cannot be, the session ends."""
        try:
            self._outgoing.put_nowait(self._encoder.encode(message))
        except asyncio.QueueFull:
            if not self._unsent.done():
                self._unsent.set_result(f"{self._outgoing.maxsize} messages wait for it")
        except Exception as error:  # a bug: whoever sends has other workers to go on with
            if not self._unsent.done():
                self._unsent.set_exception(error)

    async def status(self, timeout_s: float) -> worker_pb2.StatusResponse:
        """Ask the worker for its pool, its leases and its transfers.

        Raises:
            RemoteFault: it is not connected, or does not answer in time.
        """
        if self._stub is None:
            raise RemoteFault("there is no session with it")
        try:
            return await self._stub.Status(worker_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise RemoteFault(_describe(error)) from error
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            # The channel was closed: gRPC cancels its calls, and nobody who waits for them.
            raise RemoteFault("its session has ended") from None

    async def drain(self) -> None:
        """Wait, for a short time, until everything queued is written."""
        if not self._task.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await self._outgoing.join()

    def events_of(self, snapshot: KVSnapshot) -> list[KVEvent]:
        """What would have led to a snapshot of this worker's caches."""
        stored = [
            BlocksStored(index, hashes, None, 0, group.block_tokens)
            for index, (group, hashes) in enumerate(
                zip(self.info.groups, snapshot.hashes, strict=False)
            )
        ]
        return [*stored, *snapshot.tiers]

    def close(self) -> None:
        """End both streams; nothing is reported any more."""
        self._closed = True
        if asyncio.current_task() is not self._task:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until everything of this session has ended."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with self._connections.channel(self.info.address, CHANNEL_OPTIONS) as channel:
                reason = await self._session(channel)
        except Exception as error:
            # Ended, not restarted: the worker's next registration opens a session in a known state.
            self._failed("session")
            reason = f"a bug of ours: {type(error).__name__}"  # its text may hold token ids
        if self._closed:
            return
        try:
            self._events.lost(reason)
        except Exception:
            # The core would go on sending requests to a session that is no more.
            self._failed("session")
            self._events.broken()

    def _failed(self, task: str) -> None:
        logger.exception("%s of %s failed", task, self.info.incarnation.worker_id)
        self._events.failed(task)

    async def _session(self, channel: grpc.aio.Channel) -> str:
        stub = cast("WorkerAsyncStub", WorkerStub(channel))
        call = stub.Session(None)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.wait_for_connection()
        except TimeoutError:
            return f"no connection to {self.info.address} within {CONNECT_TIMEOUT_S:g} s"
        except grpc.aio.AioRpcError as error:
            return _describe(error)
        if self._closed:
            return "closed"
        self._stub = stub
        self._events.up()
        # A generator given to gRPC would stay behind, pending, when the worker ends.
        parts = (self._read(call), self._watch_sending(), self._write(call), self._kv_events(stub))
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            # Whichever ends first ends the session: with one part missing it would only look alive.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        finally:
            self._stub = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _write(self, call: SessionCall) -> str:
        """Send what is queued until the session ends; returns why it did."""
        opening = SessionOpen(self._router_id, self.info.incarnation, takes_batches=True)
        num_max = MESSAGES_MAX if self.info.takes_batches else 1
        try:
            await call.write(session_request_to_wire(opening))
            while True:
                taken = await take(self._outgoing, num_max)
                for request in batched(taken):
                    await call.write(request)
                for _ in taken:
                    self._outgoing.task_done()
        except grpc.aio.AioRpcError as error:
            return _describe(error)
        except asyncio.InvalidStateError:
            return "the session has ended"

    async def _read(self, call: AsyncIterable[session_pb2.SessionResponse]) -> str:
        try:
            async for response in call:
                self.heard = True
                for one in unbatched(response):
                    if self._closed:
                        return "closed"
                    self._events.message(session_response_from_wire(one, self._router_id))
        except grpc.aio.AioRpcError as error:
            return _describe(error)
        except ProtocolError as error:
            return f"protocol error: {error.message}"
        return "the worker ended the session"

    async def _watch_sending(self) -> str:
        return await self._unsent

    async def _kv_events(self, stub: "WorkerAsyncStub") -> str:
        """Follow the events for as long as the session lives; a gap or an end opens anew."""
        retry_s = KV_RETRY_MIN_S
        while True:
            call = stub.KvEvents(
                kv_events_pb2.KvEventsRequest(from_sequence=self._events.kv_sequence())
            )
            try:
                async for wire in call:
                    if not self._events.kv_batch(*kv_batch_from_wire(wire)):
                        break
                    retry_s = KV_RETRY_MIN_S
            except grpc.aio.AioRpcError as error:
                logger.debug("KV events of %s: %s", self.info.address, _describe(error))
            except ProtocolError as error:
                logger.warning("KV events of %s: %s", self.info.address, error.message)
            except Exception:
                # Restarted: an index that misses events costs time only, never the session.
                self._failed("kv_events")
            finally:
                call.cancel()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, KV_RETRY_MAX_S)


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
