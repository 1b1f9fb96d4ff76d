"""Follows the KV events that one server publishes over ZeroMQ, as vLLM does.

PUB sends ``[topic, number, payload]``, numbers as 8 bytes big-endian. A request ``[number]`` to the
replay socket (ROUTER) is answered with such messages from there on, the last with number -1.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from disagg.router.kv_event_endpoints import KVEventEndpoint
from disagg.routing.followed.event_order import AskReplay
from disagg.routing.followed.followed_caches import FollowedCache

logger = logging.getLogger(__name__)

TICK_S = 1.0
AGAIN_S = 1.0
MESSAGE_BYTES_MAX = 64 << 20
QUEUED_MAX = 20_000
"""Messages; twice what vLLM keeps for a replay."""
HEARTBEAT_MS = 2_000
SILENT_MS = 10_000
"""A server that answers no heartbeat for so long is taken for gone."""
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
Ask: TypeAlias = Callable[[AskReplay | None], None]


class KVEventSubscriber:
    """Hands one server's messages to what knows their meaning, and asks for what that misses.

    Args:
        endpoint: of the server.
        cache: takes the messages.
        now_ms: the time.
        failed: told of a bug in here, already logged.
    """

    def __init__(
        self,
        endpoint: KVEventEndpoint,
        cache: FollowedCache,
        now_ms: Callable[[], int],
        failed: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._cache = cache
        self._now_ms = now_ms
        self._failed = failed
        self._replay: asyncio.Task[None] | None = None
        self._problem = ""

    async def run(self) -> NoReturn:
        """Follow until cancelled, through every loss of the connection."""
        while True:
            with zmq.asyncio.Context() as context:
                try:
                    await self._follow(context)
                except Exception:
                    logger.exception("following KV events of %s failed", self._endpoint.name)
                    self._failed("kv_event_subscriber")
                finally:
                    self._cache.disconnected()
                    context.destroy(linger=0)
            await asyncio.sleep(AGAIN_S)

    def _log_problem(self) -> None:
        """Once, what made all that was known void."""
        if self._cache.problem != self._problem:
            self._problem = self._cache.problem
            if self._problem:
                logger.warning("KV events of %s: %s", self._endpoint.name, self._problem)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        self._replay = None
        socket = _open(context, zmq.SUB, self._endpoint.address)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.subscribe(b"")
        socket.connect(self._endpoint.address)
        async with asyncio.TaskGroup() as tasks:

            def ask(replay: AskReplay | None) -> None:
                """Begin a replay; of one that is under way nothing more is taken."""
                if replay is None:
                    return
                if self._replay is not None:
                    self._replay.cancel()
                self._replay = tasks.create_task(self._read_replays(context, replay))

            tasks.create_task(self._watch(monitor, ask))
            tasks.create_task(self._read(socket, ask))
            tasks.create_task(self._tick(ask))

    async def _watch(self, monitor: zmq.asyncio.Socket, ask: Ask) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                logger.info("KV events of %s: connected", self._endpoint.name)
                ask(self._cache.connected(self._now_ms()))
            elif event == zmq.EVENT_DISCONNECTED:
                logger.warning("KV events of %s: the server is gone", self._endpoint.name)
                self._cache.disconnected()

    async def _read(self, socket: zmq.asyncio.Socket, ask: Ask) -> None:
        while True:
            _, number, payload = self._frames(await socket.recv_multipart())
            if number is not None:
                ask(self._cache.live(self._now_ms(), number, payload))
            self._log_problem()
            await asyncio.sleep(0)  # a socket that is full would let nobody else have a turn

    async def _tick(self, ask: Ask) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            ask(self._cache.tick(self._now_ms()))

    async def _read_replays(self, context: zmq.asyncio.Context, replay: AskReplay | None) -> None:
        """Ask, and hand on what comes; the end may lead to another question."""
        while replay is not None:
            with _open(context, zmq.DEALER, self._endpoint.replay) as socket:
                socket.connect(self._endpoint.replay)
                await socket.send_multipart([b"", replay.first.to_bytes(8, "big")])
                while True:
                    is_end, number, payload = self._frames((await socket.recv_multipart())[1:])
                    if is_end:
                        break
                    if number is not None:
                        self._cache.replayed(self._now_ms(), number, payload)
                    self._log_problem()
                    await asyncio.sleep(0)
            replay = self._cache.replay_ended(self._now_ms())

    def _frames(self, frames: list[bytes]) -> tuple[bool, int | None, object]:
        """Whether a replay ends here; number and payload of a message that can be read."""
        try:
            _, number, payload = frames
            if number == END_OF_REPLAY:
                return True, None, None
            if len(number) == NUMBER_BYTES:
                return False, int.from_bytes(number, "big"), msgpack.unpackb(payload)
            why = f"a number of {len(number)} bytes"
        except (ValueError, msgpack.UnpackException) as error:
            why = f"{type(error).__name__}: no message of KV events"
        self._cache.unreadable(why)
        return False, None, None


def _open(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    # For names it would prefer that of two protocols which a server may not listen on.
    socket.ipv6 = address.startswith("tcp://[")
    socket.set_hwm(QUEUED_MAX)
    socket.maxmsgsize = MESSAGE_BYTES_MAX
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    return socket
