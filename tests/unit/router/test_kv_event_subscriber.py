"""What a subscriber to KV events does when: how much it reads, and how long it works for it."""

import asyncio

import msgpack

from disagg.router.kv_event_endpoints import KVEventEndpoint
from disagg.router.kv_event_subscriber import KVEventSubscriber
from disagg.routing.followed.followed_caches import FollowedCaches
from disagg.testing.scripted_worker import HASHER


async def test_much_work_for_one_server_leaves_time_for_others(monkeypatch) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    subscriber = KVEventSubscriber(*[None] * 4)  # type: ignore[arg-type]
    now_s = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await subscriber._give_way(now_s - 1)
    await subscriber._give_way(now_s + 1)
    assert pauses[0] >= 1
    assert pauses[1:] == [0]


class Sent:
    """A socket that has messages without end."""

    def __init__(self) -> None:
        self.num_read = 0

    async def recv_multipart(self) -> list[bytes]:
        self.num_read += 1
        return [b"", self.num_read.to_bytes(8, "big"), msgpack.packb([0, [], 0])]


async def test_while_a_replay_is_under_way_nothing_piles_up_behind_it() -> None:
    """Its end would have to take all of it in at once."""
    endpoint = KVEventEndpoint("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    caches = FollowedCaches(HASHER.extend, HASHER.block_tokens)
    cache = caches.follow("a", lambda salt: b"", can_replay=True)
    subscriber = KVEventSubscriber(endpoint, cache, lambda: 0, lambda what: None)
    replay, socket = asyncio.Event(), Sent()
    cache.connected(0)

    async def read_replay() -> None:
        await replay.wait()

    subscriber._replay = asyncio.create_task(read_replay())
    reading = asyncio.create_task(subscriber._read(socket, lambda ask: None))  # type: ignore[arg-type]
    for _ in range(10):
        await asyncio.sleep(0)
    assert socket.num_read == 0
    cache.replayed(0, 0, [0, [], 0])
    cache.replay_ended(0)
    replay.set()
    for _ in range(100):
        await asyncio.sleep(0)
    reading.cancel()
    assert caches.views()[0].num_batches > 1
