"""Follows the KV events that one server publishes over ZeroMQ, as vLLM does.

PUB sends ``[topic, number, payload]``, numbers as 8 bytes big-endian. A request ``[number]`` to the
replay socket (ROUTER) is answered with such messages from there on, the last with number -1.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn, TypeAlias

import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from disagg.router.kv_event_endpoints import ENDPOINTS_MAX, KVEventEndpoint
from disagg.routing.followed.event_order import AskReplay
from disagg.routing.followed.followed_caches import FollowedCache
from disagg.routing.followed.vllm_events import Message, read_message

logger = logging.getLogger(__name__)

TICK_S = 1.0
AGAIN_S = 1.0
AGAIN_MAX_S = 10.0
"""Between two connections of which the first did not last longer."""
LOG_S = 60.0
MESSAGE_BYTES_MAX = 8 << 20
"""A step of vLLM that stores 80,000 blocks of 16 tokens."""
AT_ONCE_BYTES = 64 << 10
"""Of a message that is read in the event loop: a millisecond or two. Others are in a thread."""
CONTAINERS_MAX = 1 << 18
"""Lists and maps of a message. Empty ones take a byte each there, and sixty here."""
QUEUED_MAX = 1_000
"""Messages; of more, those that a replay can bring are let go, and others wait at the server."""
REPLAYED_QUEUED_MAX = 20_000
"""Twice what vLLM keeps: its replay loses what finds no room."""
WORK_S = 0.005
"""After so much work in the event loop others than followed servers get as much of its time."""
HEARTBEAT_MS = 2_000
SILENT_MS = 10_000
"""A server that answers no heartbeat for so long is taken for gone."""
NUMBER_BYTES = 8
SOCKETS_EACH = 8
"""Of a server at most, with those of a connection that is being closed."""
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
Ask: TypeAlias = Callable[[AskReplay | None], None]


class Turns:
    """All servers' part of the event loop's time: a part at a time, and half of it at most."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._worked_s = 0.0

    @asynccontextmanager
    async def next(self) -> AsyncIterator[None]:
        """Take in one message, or a part of one."""
        async with self._lock:
            began_s = asyncio.get_running_loop().time()
            yield
            self._worked_s += asyncio.get_running_loop().time() - began_s
            pause_s = 0.0
            if self._worked_s >= WORK_S:
                pause_s, self._worked_s = self._worked_s, 0.0
            await asyncio.sleep(pause_s)


class KVEventSubscriber:
    """Hands one server's messages to what knows their meaning, and asks for what that misses.

    Args:
        endpoint: of the server.
        cache: takes the messages.
        turns: of all servers.
        now_ms: the time.
        failed: told of a bug in here, already logged.
    """

    def __init__(
        self,
        endpoint: KVEventEndpoint,
        cache: FollowedCache,
        turns: Turns,
        now_ms: Callable[[], int],
        failed: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._cache = cache
        self._turns = turns
        self._now_ms = now_ms
        self._failed = failed
        self._replay: asyncio.Task[None] | None = None
        self._problem = ""
        self._log_again_s = 0.0
        self._log_silence_again_s = 0.0
        self._is_refusal_told = False

    async def run(self, context: zmq.asyncio.Context) -> NoReturn:
        """Follow until cancelled, through every loss of the connection.

        Each connection has sockets of its own: what was queued of the one before would be taken
        for what the server's next life holds.

        Args:
            context: of `new_context`, shared by all.
        """
        loop, pause_s = asyncio.get_running_loop(), AGAIN_S
        while True:
            began_s = loop.time()
            try:
                with _open(context, zmq.SUB, self._endpoint.address, QUEUED_MAX) as socket:
                    await self._follow(context, socket)
            except Exception:
                logger.exception("following KV events of %s failed", self._endpoint.name)
                self._failed("kv_event_subscriber")
            finally:
                self._cache.disconnected()
            lasted = loop.time() - began_s > AGAIN_MAX_S
            pause_s = AGAIN_S if lasted else min(2 * pause_s, AGAIN_MAX_S)
            await asyncio.sleep(pause_s)

    def _log_problem(self) -> None:
        """What made all that was known void; it may be something else with every message."""
        if self._cache.problem == self._problem:
            return
        self._problem = self._cache.problem
        now_s = asyncio.get_running_loop().time()
        if self._problem and now_s >= self._log_again_s:
            self._log_again_s = now_s + LOG_S
            logger.warning("KV events of %s: %s", self._endpoint.name, self._problem)

    def _log_silence(self) -> None:
        """Nobody answered where replays are asked for, so what was before remains unknown."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._log_silence_again_s:
            self._log_silence_again_s = now_s + LOG_S
            logger.warning(
                "KV events of %s: %s does not answer; is it the server's replay_endpoint?",
                self._endpoint.name,
                self._endpoint.replay,
            )

    async def _follow(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
        """Follow until the connection ends."""
        self._replay = None
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        with socket.get_monitor_socket(watched) as monitor:
            socket.subscribe(b"")
            socket.connect(self._endpoint.address)
            try:
                await self._follow_connected(context, socket, monitor)
            finally:
                socket.disable_monitor()

    async def _follow_connected(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
    ) -> None:
        async with asyncio.TaskGroup() as tasks:

            def ask(replay: AskReplay | None) -> None:
                """Begin a replay; of one that is under way nothing more is taken."""
                if replay is None:
                    return
                if self._replay is not None:
                    self._replay.cancel()
                self._replay = tasks.create_task(self._read_replays(context, replay))

            queue: asyncio.Queue[list[bytes]] = asyncio.Queue(QUEUED_MAX)
            parts = (self._receive(socket, queue), self._read(queue, ask), self._tick(ask))
            others = [tasks.create_task(one) for one in parts]
            await self._until_gone(monitor, ask)
            if self._replay is not None:
                others.append(self._replay)
            for task in others:
                task.cancel()

    async def _until_gone(self, monitor: zmq.asyncio.Socket, ask: Ask) -> None:
        name, is_connected = self._endpoint.name, False
        while (event := (await recv_monitor_message(monitor))["event"]) != zmq.EVENT_DISCONNECTED:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_connected, self._is_refusal_told = True, False
                logger.info("KV events of %s: connected", name)
                ask(self._cache.connected(self._now_ms()))
        if is_connected:
            logger.warning("KV events of %s: the server is gone", name)
        elif not self._is_refusal_told:
            self._is_refusal_told = True
            where = self._endpoint.address
            logger.warning("KV events of %s: %s ends connections; is it a publisher?", name, where)

    async def _receive(self, socket: zmq.asyncio.Socket, queue: asyncio.Queue[list[bytes]]) -> None:
        """Read always: of a connection that is not read ZeroMQ hears no heartbeat, and ends it."""
        while True:
            frames = await socket.recv_multipart()
            if not queue.full():
                queue.put_nowait(frames)
            elif not self._endpoint.replay:
                await queue.put(frames)
            await asyncio.sleep(0)

    async def _read(self, queue: asyncio.Queue[list[bytes]], ask: Ask) -> None:
        while True:
            # What waited for a replay in the cache would be taken in at its end without a pause:
            # seconds of work in the event loop.
            while self._cache.is_asking and self._replay and not self._replay.done():
                await asyncio.wait({self._replay}, timeout=TICK_S)
            frames = await queue.get()
            async with self._turns.next():
                _, number, message = await self._message(frames)
                if number is not None:
                    ask(self._cache.live(self._now_ms(), number, message))
            await self._take_in_rest()

    async def _take_in_rest(self) -> None:
        """What is due besides, in parts, between which everybody's streams go on."""
        while self._cache.has_due:
            async with self._turns.next():
                self._cache.take_in()
        self._log_problem()

    async def _tick(self, ask: Ask) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            was_asking = self._cache.is_asking
            again = self._cache.tick(self._now_ms())
            if was_asking and (again is not None or not self._cache.is_asking):
                self._log_silence()
            ask(again)
            await self._take_in_rest()

    async def _read_replays(self, context: zmq.asyncio.Context, replay: AskReplay | None) -> None:
        """Ask, and hand on what comes; the end may lead to another question."""
        while replay is not None:
            with _open(context, zmq.DEALER, self._endpoint.replay, REPLAYED_QUEUED_MAX) as socket:
                socket.connect(self._endpoint.replay)
                await socket.send_multipart([b"", replay.first.to_bytes(8, "big")])
                while True:
                    _, *frames = await socket.recv_multipart()
                    async with self._turns.next():
                        is_end, number, message = await self._message(frames)
                        if number is not None:
                            self._cache.replayed(self._now_ms(), number, message)
                    await self._take_in_rest()
                    if is_end:
                        break
            replay = self._cache.replay_ended(self._now_ms())
            await self._take_in_rest()

    async def _message(self, frames: list[bytes]) -> tuple[bool, int | None, Message]:
        """Whether a replay ends here; number and payload of a message that can be read."""
        try:
            _, number, payload = frames
            if number == END_OF_REPLAY:
                return True, None, ()
            if len(number) == NUMBER_BYTES:
                if len(payload) > AT_ONCE_BYTES:
                    message = await asyncio.to_thread(_read, payload)
                else:
                    message = _read(payload)
                return False, int.from_bytes(number, "big"), message
            why = f"a number of {len(number)} bytes"
        except (ValueError, msgpack.UnpackException) as error:
            why = f"{type(error).__name__}: no message of KV events"
        self._cache.unreadable(why)
        return False, None, ()


def _read(payload: bytes) -> Message:
    return read_message(_unpacked(payload))


def _unpacked(payload: bytes) -> object:
    """What a message says.

    Raises:
        ValueError: nothing, or it has too many parts.
    """
    num = 0

    def counted(container: object) -> object:
        nonlocal num
        num += 1
        if num > CONTAINERS_MAX:
            raise ValueError(f"more than {CONTAINERS_MAX} lists and maps")
        return container

    return msgpack.unpackb(payload, list_hook=counted, object_hook=counted)


def new_context() -> zmq.asyncio.Context:
    """One for all servers: each has two threads, and files open beside those of its sockets."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * ENDPOINTS_MAX)
    return context


def _open(
    context: zmq.asyncio.Context, kind: int, address: str, queued_max: int
) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    # For names it would prefer that of two protocols which a server may not listen on.
    socket.ipv6 = address.startswith("tcp://[")
    socket.set_hwm(queued_max)
    socket.maxmsgsize = MESSAGE_BYTES_MAX
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    return socket
