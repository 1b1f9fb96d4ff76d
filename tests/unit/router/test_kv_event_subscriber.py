"""What a subscriber to KV events does when: how much it reads, and how long it works for it."""

import asyncio
import time

import msgpack
import pytest

from disagg.router.kv_event_endpoints import KVEventEndpoint
from disagg.router.kv_event_subscriber import QUEUED_MAX, KVEventSubscriber, Turns
from disagg.routing.followed.followed_caches import FollowedCache, FollowedCaches
from disagg.testing.scripted_worker import HASHER

LIVE = KVEventEndpoint("a", "tcp://127.0.0.1:1")
REPLAYING = KVEventEndpoint("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")


async def test_much_work_for_all_servers_leaves_time_for_others(monkeypatch) -> None:
    pauses: list[float] = []
    at_work = 0
    sleep = asyncio.sleep

    async def noted(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    async def work(turns: Turns, work_s: float) -> None:
        nonlocal at_work
        async with turns.next():
            at_work += 1
            assert at_work == 1
            time.sleep(work_s)  # noqa: ASYNC251
        at_work -= 1  # after the pause

    monkeypatch.setattr(asyncio, "sleep", noted)
    turns = Turns()
    async with asyncio.TaskGroup() as tasks:
        for work_s in (0.1, 0.0, 0.1):
            tasks.create_task(work(turns, work_s))
    assert [pause_s >= 0.1 for pause_s in pauses] == [True, False, True]


def follower(endpoint: KVEventEndpoint) -> tuple[FollowedCaches, FollowedCache, KVEventSubscriber]:
    caches = FollowedCaches(HASHER.extend, HASHER.block_tokens)
    cache = caches.follow("a", lambda salt: b"", can_replay=bool(endpoint.replay))
    subscriber = KVEventSubscriber(endpoint, cache, Turns(), lambda: 0, lambda what: None)
    cache.connected(0)
    return caches, cache, subscriber


class Sent:
    """A socket that has messages without end."""

    def __init__(self) -> None:
        self.num_read = 0

    async def recv_multipart(self) -> list[bytes]:
        self.num_read += 1
        return [b"", self.num_read.to_bytes(8, "big"), msgpack.packb([0, [], 0])]


async def test_while_a_replay_is_under_way_nothing_piles_up_behind_it() -> None:
    """Its end would have to take all of it in at once."""
    caches, cache, subscriber = follower(REPLAYING)
    replay = asyncio.Event()

    async def read_replay() -> None:
        await replay.wait()

    subscriber._replay = asyncio.create_task(read_replay())
    queue: asyncio.Queue[list[bytes]] = asyncio.Queue()
    for _ in range(10):
        queue.put_nowait(await Sent().recv_multipart())
    reading = asyncio.create_task(subscriber._read(queue, lambda ask: None))
    for _ in range(10):
        await asyncio.sleep(0)
    assert queue.qsize() == 10
    cache.replayed(0, 0, ())
    cache.replay_ended(0)
    replay.set()
    for _ in range(100):
        await asyncio.sleep(0)
    reading.cancel()
    assert caches.views()[0].num_batches > 1


@pytest.mark.parametrize("replays", [True, False])
async def test_a_connection_is_read_while_nothing_can_be_taken_in(replays: bool) -> None:
    """ZeroMQ heard no heartbeat of a server whose messages filled the socket meanwhile.

    What a replay can bring is let go; anything else waits at the server.
    """
    _, _, subscriber = follower(REPLAYING if replays else LIVE)
    queue: asyncio.Queue[list[bytes]] = asyncio.Queue(QUEUED_MAX)
    socket = Sent()
    receiving = asyncio.create_task(subscriber._receive(socket, queue))  # type: ignore[arg-type]
    for _ in range(3 * QUEUED_MAX):
        await asyncio.sleep(0)
    receiving.cancel()
    assert queue.qsize() == QUEUED_MAX
    assert (socket.num_read > 2 * QUEUED_MAX) == replays


async def test_other_tasks_go_on_beside_a_message_of_eight_megabytes() -> None:
    """At once it held all streams of a router up for half a second and more."""
    num = 60_000
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(num)),
        "token_ids": [100_000] * (num * HASHER.block_tokens),
        "block_size": HASHER.block_tokens,
    }
    small = msgpack.packb([0, [{"type": "BlockRemoved", "block_hashes": [num - 1]}], 0])
    caches, _, subscriber = follower(LIVE)
    queue: asyncio.Queue[list[bytes]] = asyncio.Queue()
    for number, payload in enumerate((msgpack.packb([0, [event], 0]), small)):
        queue.put_nowait([b"", number.to_bytes(8, "big"), payload])
    reading = asyncio.create_task(subscriber._read(queue, lambda ask: None))
    seen = set()
    while caches.views()[0].num_batches < 2:
        seen.add(caches.views()[0].num_blocks)
        await asyncio.sleep(0)
    reading.cancel()
    assert len(seen) > 20, "turns of the event loop in which a part was there"
    assert caches.views()[0].num_blocks == num - 1, "in order"
