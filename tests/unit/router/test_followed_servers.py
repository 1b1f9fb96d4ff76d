"""A router follows servers that publish KV events over real sockets, and tells what they hold."""

import asyncio
import contextlib
import os
import time
from typing import Any

import grpc
import msgpack
import pytest
import zmq

from disagg.kv.event_log import KVEventLog
from disagg.kv.event_publishing import VllmEventShape
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import KVCacheGroup
from disagg.messages.kv_events import BlocksRemoved, BlocksStored
from disagg.router import kv_event_subscriber
from disagg.router.kv_event_subscriber import CONTAINERS_MAX
from disagg.routing.followed import event_order
from disagg.testing.scripted_worker import HASHER
from disagg.wire.v1 import router_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from disagg.workers.kv_event_publisher import KVEventPublisher
from tests.unit.router.scripted_worker import BOUND_S

BLOCK = HASHER.block_tokens
GROUPS = (KVCacheGroup(0, FullAttentionSpec(BLOCK, 1, 8, 2), (0,)),)
PROMPT = list(range(10, 10 + 3 * BLOCK + 1))


def blocks(first: int, end: int) -> BlocksStored:
    """Some of the prompt's blocks, in an event that carries their tokens."""
    hashes: list[bytes] = []
    HASHER.extend(hashes, PROMPT)
    tokens = tuple(PROMPT[first * BLOCK : end * BLOCK])
    parent = hashes[first - 1] if first else None
    return BlocksStored(0, tuple(hashes[first:end]), parent, first * BLOCK, BLOCK, tokens)


class Lossy:
    """A publisher's socket that can be told to lose what is sent."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.loses = False

    def send_multipart(self, frames: Any, flags: int = 0) -> None:
        if not self.loses:
            self.socket.send_multipart(frames, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


class Server:
    """Publishes what is put in its log, and answers replays, in the test's own event loop."""

    def __init__(self, folder: Any) -> None:
        self.log = KVEventLog(lambda: ((),), 1)
        self.publisher = KVEventPublisher(
            self.log,
            VllmEventShape(GROUPS),
            endpoint=f"ipc://{folder}/events",
            replay_endpoint=f"ipc://{folder}/replay",
        )
        self.lossy = Lossy(self.publisher._pub)
        self.publisher._pub = self.lossy  # type: ignore[assignment]
        self.is_answering = True
        self._task = asyncio.create_task(self._answer())

    def say(self, *events: Any) -> None:
        for event in events:
            self.log.append(event)
        self.publisher.publish()

    async def _answer(self) -> None:
        while True:
            if self.is_answering:
                self.publisher.answer_replays()
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.publisher.close()


@pytest.fixture
async def start(tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        def started(folder: Any = tmp_path) -> Server:
            server = Server(folder)
            stack.push_async_callback(server.close)
            return server

        yield started


class Follower:
    """A router that follows ``a``, without any worker."""

    def __init__(self, house, stub) -> None:
        self.house, self.stub = house, stub

    def view(self):
        (view,) = self.house.app._followed.caches.views()
        return view

    async def held(self, **more: Any) -> list[tuple[str, int]]:
        request = router_pb2.MatchRequest(model="tiny", token_ids=PROMPT, **more)
        found = await self.stub.Match(request)
        assert found.num_tokens == len(PROMPT)
        return [(one.name, one.usable_tokens) for one in found.followed]

    async def until_held(self, num_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + BOUND_S
        while (seen := dict(await self.held()).get("a", 0)) != num_tokens:
            assert loop.time() < end, f"{seen} in place of {num_tokens}; {self.view()}"
            await asyncio.sleep(0.02)


@pytest.fixture
async def follow(open_house, tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def followed(
            *, replay: bool = True, replays_of: Any = tmp_path, **options: Any
        ) -> Follower:
            text = f"a=ipc://{tmp_path}/events" + f"?replay=ipc://{replays_of}/replay" * replay
            house = await open_house(
                kv_event_endpoints=(text,), kv_event_block_tokens=BLOCK, **options
            )
            address = f"127.0.0.1:{house.app.grpc_port}"
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            return Follower(house, RouterStub(channel))

        yield followed


async def test_match_tells_what_a_followed_server_holds(start, follow) -> None:
    follower = await follow()
    assert await follower.held() == []
    server = start()
    server.say(blocks(0, 2))
    await follower.until_held(2 * BLOCK)
    server.say(blocks(2, 3))
    await follower.until_held(3 * BLOCK)
    assert await follower.held(cache_salt="another") == [("a", 0)]
    server.say(BlocksRemoved(0, blocks(1, 2).hashes))
    await follower.until_held(BLOCK)
    answer = await follower.house.admin.get("/metrics")
    assert 'disagg_followed_blocks{server="a"} 2.0' in answer.text
    assert 'disagg_followed_losses_total{server="a"} 0.0' in answer.text


async def test_what_was_said_before_comes_by_replay(start, follow) -> None:
    server = start()
    server.say(blocks(0, 2))
    follower = await follow()
    await follower.until_held(2 * BLOCK)


async def test_a_replay_of_another_server_is_found_out(start, follow, tmp_path) -> None:
    (folder := tmp_path / "b").mkdir()
    start(folder).say(blocks(0, 3))
    server, follower = start(), await follow(replays_of=folder)
    await follower.until_held(3 * BLOCK)  # nothing contradicts it yet
    server.say(blocks(0, 1))
    await follower.until_held(BLOCK)
    server.say(blocks(1, 2))
    await follower.until_held(2 * BLOCK)
    assert "of another server" in follower.view().problem


async def test_without_replay_only_what_is_said_from_now_on(start, follow) -> None:
    """Control of the test above."""
    server = start()
    server.say(blocks(0, 2))
    follower = await follow(replay=False)
    await follower.house.until(lambda: follower.view().is_complete, "connected")
    loop = asyncio.get_running_loop()
    end = loop.time() + BOUND_S
    while await follower.held() != [("a", BLOCK)]:  # the subscription may be later
        assert loop.time() < end
        server.say(blocks(0, 1))
        await asyncio.sleep(0.02)


async def test_a_lost_message_is_mended(start, follow) -> None:
    server, follower = start(), await follow()
    server.say(blocks(0, 1))
    await follower.until_held(BLOCK)
    server.lossy.loses = True
    server.say(blocks(1, 2))
    server.lossy.loses = False
    server.say(blocks(2, 3))
    await follower.until_held(3 * BLOCK)
    assert follower.view().num_losses == 0


async def test_without_a_replay_a_lost_message_loses_all(start, follow) -> None:
    """Control of the test above, and what is said instead of something wrong."""
    server, follower = start(), await follow(replay=False)
    await follower.house.until(lambda: follower.view().is_complete, "connected")
    while follower.view().num_batches == 0:
        server.say(blocks(0, 1))
        await asyncio.sleep(0.02)
    await follower.until_held(BLOCK)
    server.lossy.loses = True
    server.say(blocks(1, 2))
    server.lossy.loses = False
    server.say(blocks(2, 3))
    await follower.house.until(lambda: follower.view().num_losses == 1, "a loss")
    await follower.until_held(0)
    assert follower.view().num_unnamed == 1


async def test_a_server_that_ends_is_forgotten_and_its_next_life_is_followed(start, follow) -> None:
    server, follower = start(), await follow()
    server.say(blocks(0, 3))
    await follower.until_held(3 * BLOCK)
    await server.close()
    await follower.until_held(0)
    server = start()
    server.say(blocks(0, 1))
    await follower.until_held(BLOCK)


async def test_what_is_queued_of_a_life_that_ended_is_not_taken_for_the_next(start, follow) -> None:
    """The router stands still meanwhile, so all of it has come before it looks at anything."""
    server, follower = start(), await follow(replay=False)
    await follower.house.until(lambda: follower.view().is_complete, "connected")
    while follower.view().num_batches == 0:
        server.say(blocks(0, 1))
        await asyncio.sleep(0.02)
    for _ in range(50):
        server.say(blocks(0, 3))
    time.sleep(0.3)  # noqa: ASYNC251
    server.publisher.close()
    start()
    time.sleep(0.5)  # noqa: ASYNC251
    await follower.house.until(lambda: not follower.view().is_complete, "the end of the first")
    await follower.house.until(lambda: follower.view().is_complete, "the connection to the next")
    for _ in range(100):
        await asyncio.sleep(0)
    assert await follower.held() == []


async def test_what_is_no_publisher_is_told_once(open_house, monkeypatch, caplog) -> None:
    monkeypatch.setattr(kv_event_subscriber, "AGAIN_S", 0.01)
    monkeypatch.setattr(kv_event_subscriber, "AGAIN_MAX_S", 0.01)
    num_asked = 0

    def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        house = await open_house(kv_event_endpoints=(f"a=tcp://127.0.0.1:{port}",))
        await house.until(lambda: num_asked > 2, "two tries that are over")
    told = [one.message for one in caplog.records if "KV events of a" in one.message]
    address = f"tcp://127.0.0.1:{port}"
    assert told == [f"KV events of a: {address} ends connections; is it a publisher?"]


async def test_a_long_replay_ends_no_connection(start, follow, monkeypatch, caplog) -> None:
    """ZeroMQ hears no heartbeat of a server whose messages have filled the socket.

    So a router that had much to catch up with lost the connection, and began from nothing again.
    """
    monkeypatch.setattr(kv_event_subscriber, "HEARTBEAT_MS", 50)
    monkeypatch.setattr(kv_event_subscriber, "SILENT_MS", 300)
    monkeypatch.setattr(kv_event_subscriber, "QUEUED_MAX", 10)
    server = start()
    server.is_answering = False
    follower = await follow()
    await follower.house.until(
        lambda: follower.house.app._followed._parts[0][1].is_asking, "the question"
    )
    for _ in range(20):  # the replay takes twice as long as a server may be silent
        for _ in range(10):
            server.say(blocks(0, 1))
        await asyncio.sleep(0.05)
    server.say(blocks(1, 3))
    server.is_answering = True
    await follower.until_held(3 * BLOCK)
    assert "KV events of a: the server is gone" not in [one.message for one in caplog.records]


async def test_a_replay_that_nobody_answers_is_told_once(
    start, follow, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(event_order, "REPLAY_SILENT_MS", 100)
    monkeypatch.setattr(event_order, "PROBE_MS", 100)
    monkeypatch.setattr(kv_event_subscriber, "TICK_S", 0.02)
    server = start()
    server.is_answering = False
    follower = await follow()
    caches = follower.house.app._followed._parts[0][1]
    for _ in range(3):
        await follower.house.until(lambda: caches.is_asking, "a question")
        await follower.house.until(lambda: not caches.is_asking, "its end")
    told = [one.message for one in caplog.records if "does not answer" in one.message]
    assert len(told) == 1
    assert told[0].startswith("KV events of a: ipc://")


async def test_many_servers_share_threads(open_house) -> None:
    """Each had two, and files open beside its connection: 256 of them took 2,065 files."""
    before = len(os.listdir("/proc/self/task"))
    endpoints = tuple(f"s{n}=tcp://127.0.0.1:{n + 1}?replay=tcp://127.0.0.1:1" for n in range(32))
    house = await open_house(kv_event_endpoints=endpoints)
    await house.until(lambda: len(os.listdir("/proc/self/task")) > before, "the first connection")
    for _ in range(100):  # all tasks have begun
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/task")) - before < len(endpoints)


async def test_messages_that_can_never_be_read_are_logged_once_a_minute(
    start, follow, caplog
) -> None:
    server, follower = start(), await follow(replay=False)
    await follower.house.until(lambda: follower.view().is_complete, "connected")
    number = 1
    while follower.view().num_batches < 5:
        fault = {"type": "BlockStored", "token_ids": [0] * number, "block_size": number + 1}
        payload = msgpack.packb([0, [fault | {"block_hashes": []}]])
        server.publisher._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
        number += 1
        await asyncio.sleep(0.02)
    told = [one.message for one in caplog.records if "no blocks of" in one.message]
    assert len(told) == 1
    assert told[0] != f"KV events of a: {follower.view().problem}"


async def test_what_cannot_be_read_is_told(start, follow) -> None:
    server, follower = start(), await follow()
    server.say(blocks(0, 3))
    await follower.until_held(3 * BLOCK)
    publisher = server.publisher
    many = msgpack.packb([0, [[]] * CONTAINERS_MAX, 0])
    for payload, why in (
        (b"\xc1", "no message of KV events"),
        (msgpack.packb(7), "no array"),
        (many, "no message of KV events"),
    ):
        publisher._kept.append((publisher._next_batch, payload))
        number = publisher._next_batch.to_bytes(8, "big")
        publisher._next_batch += 1
        publisher._pub.send_multipart([b"", number, payload], zmq.NOBLOCK)
        await follower.house.until(lambda why=why: why in follower.view().problem, why)
        await follower.until_held(0)
    server.say(blocks(0, 2))
    await follower.until_held(2 * BLOCK)


async def test_workers_and_followed_servers_are_told_apart(start, follow) -> None:
    server, follower = start(), await follow()
    server.say(blocks(0, 1))
    await follower.until_held(BLOCK)
    await follower.house.add("w1")
    request = router_pb2.MatchRequest(model="tiny", token_ids=PROMPT)
    found = await follower.stub.Match(request)
    assert [one.worker.worker_id for one in found.workers] == ["w1"]
    assert [(one.name, one.usable_tokens) for one in found.followed] == [("a", BLOCK)]


async def test_a_server_may_have_an_address_of_ipv6(open_house) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.ipv6 = True
        try:
            port = publisher.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError:
            pytest.skip("this machine has no IPv6")
        endpoint = f"a=tcp://[::1]:{port}"
        house = await open_house(kv_event_endpoints=(endpoint,))

        def is_connected() -> bool:
            (view,) = house.app._followed.caches.views()
            return view.is_complete

        await house.until(is_connected, "the connection")
