"""KV events byte for byte as vLLM 0.33.0's encoder writes them, and over real sockets.

The hex strings are the output of msgspec 0.22 for vLLM 0.33.0's own event structures, filled with
the values that the tests repeat.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from disagg.errors import ConfigError
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.event_log import KVEventLog
from disagg.kv.event_publishing import VllmEventShape
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.kv_events import AllCleared, BlocksRemoved, BlocksStored, KVEvent
from disagg.workers.kv_event_publisher import END_OF_REPLAY, KVEventPublisher, pack_batch

FULL = FullAttentionSpec(2, 1, 8, 2)
GROUPS = (
    KVCacheGroup(0, FULL, (0,)),
    KVCacheGroup(1, FULL, (1,)),
    KVCacheGroup(2, LinearStateSpec(2, 64), (2,)),
    KVCacheGroup(3, SlidingWindowSpec(16, 1, 8, 2, 1024), (3,)),
)
BIG = (1 << 64) - 1


def packed(shape: VllmEventShape, timestamp_s: float, *events: KVEvent) -> str:
    return pack_batch(shape.batch(timestamp_s, events)).hex()


def test_stored_with_integer_hashes() -> None:
    """Hash values 1 and 2**64 - 1, tokens 5 6 7 70000, block size 2, group 0, time 1234.5."""
    event = BlocksStored(0, (bytes(31) + b"\1", b"\xff" * 32), None, 0, 2, (5, 6, 7, 70_000))
    assert packed(VllmEventShape(GROUPS), 1234.5, event) == (
        "93cb40934a000000000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "9201cfffffffffffffffffb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394050607"
        "ce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e"
        "616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f"
        "6b696e64ae66756c6c5f617474656e74696f6e00"
    )


def test_stored_with_byte_hashes_in_a_window_group() -> None:
    """Hash 00 01 .. 1f, parent 32 zero bytes, tokens 0 .. 15, window 1024, rank 2, time 0."""
    event = BlocksStored(3, (bytes(range(32)),), bytes(32), 16, 16, tuple(range(16)))
    shape = VllmEventShape(GROUPS, data_parallel_rank=2, int_hashes=False)
    assert packed(shape, 0.0, event) == (
        "93cb000000000000000091de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "91c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fb1706172656e745f62"
        "6c6f636b5f68617368c4200000000000000000000000000000000000000000000000000000000000000000a9"
        "746f6b656e5f696473dc0010000102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72"
        "615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f"
        "75705f69647803b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b76"
        "5f63616368655f737065635f736c6964696e675f77696e646f77cd040002"
    )


def test_removed_and_cleared() -> None:
    """Hash 300 of group 1, then the end of all; time 1."""
    removed = BlocksRemoved(1, ((300).to_bytes(32, "big"),))
    assert packed(VllmEventShape(GROUPS), 1.0, removed, AllCleared()) == (
        "93cb3ff00000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391"
        "cd012ca66d656469756da3475055a967726f75705f6964780181a474797065b0416c6c426c6f636b73436c65"
        "6172656400"
    )


def test_another_field_order_is_other_bytes() -> None:
    batch: list[Any] = VllmEventShape(GROUPS).batch(1.0, [BlocksRemoved(1, (b"\1" * 32,))])
    turned = [batch[0], [dict(reversed(batch[1][0].items()))], batch[2]]
    assert msgpack.unpackb(pack_batch(turned)) == msgpack.unpackb(pack_batch(batch)) == batch
    assert pack_batch(turned) != pack_batch(batch)


def test_events_without_their_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="carries 0 of 2 token ids"):
        VllmEventShape(GROUPS).batch(0.0, [BlocksStored(0, (b"x" * 32,), None, 0, 2)])


def test_token_ranges_are_exact_in_every_group() -> None:
    """A prompt of 12 tokens in steps of 8 and 4: the window has passed its first blocks."""
    specs: tuple[Spec, ...] = (FULL, SlidingWindowSpec(2, 1, 8, 2, 3), LinearStateSpec(2, 64))
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    kv = KVCacheCoordinator(
        KVCacheLayout(groups, 64, 2),
        64,
        max_model_tokens=64,
        max_step_tokens=8,
        events_with_tokens=True,
    )
    request = KVSequence("r", list(range(100, 112)))
    BlockHasher(b"key", 2).extend(request.hashes, request.token_ids)
    for new in (8, 4):
        assert kv.allocate(request, num_new_tokens=new)
        done = kv.num_scheduled_tokens("r")
        kv.publish("r", done)
        kv.release_out_of_window("r", done)
    batch = kv.events.since(0)
    assert batch is not None
    _, wire, _ = VllmEventShape(groups, int_hashes=False).batch(0.0, batch.events)
    assert isinstance(wire, list)
    seen = [
        (e["group_idx"], e["kv_cache_spec_kind"], e["token_ids"], len(e["block_hashes"]))
        for e in wire
    ]
    assert seen == [
        (0, "full_attention", list(range(100, 108)), 4),
        (1, "sliding_window", list(range(100, 108)), 4),
        (2, "mamba", [106, 107], 1),  # the state at 8
        (0, "full_attention", list(range(108, 112)), 2),
        (1, "sliding_window", list(range(108, 112)), 2),
        (2, "mamba", [110, 111], 1),
    ]
    assert wire[1]["kv_cache_spec_sliding_window"] == 3
    for event in wire:
        first = (event["token_ids"][0] - 100) // 2
        assert event["parent_block_hash"] == (request.hashes[first - 1] if first else None)
        assert event["block_hashes"] == request.hashes[first : first + len(event["block_hashes"])]


class Subscriber:
    """Reads a publisher's messages; every wait has a bound."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(publisher.endpoint)
        self.sub.subscribe(b"")
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(publisher.replay_endpoint)

    def read(self) -> list[bytes]:
        assert self.sub.poll(5_000), "nothing was published"
        return self.sub.recv_multipart()

    def ask(self, publisher: KVEventPublisher, first: bytes) -> list[list[bytes]]:
        self.dealer.send_multipart([b"", first])
        answers: list[list[bytes]] = []
        for _ in range(500):
            publisher.answer_replays()
            while self.dealer.poll(10):
                answers.append(self.dealer.recv_multipart()[1:])
                if answers[-1][1] == END_OF_REPLAY:
                    return answers
        raise AssertionError(f"no end of the replay after {answers}")


@pytest.fixture
def log() -> KVEventLog:
    return KVEventLog(lambda: ((), (), (), ()), 4, events_max=3)


@pytest.fixture
def publisher(log: KVEventLog) -> Iterator[KVEventPublisher]:
    made = KVEventPublisher(
        log,
        VllmEventShape(GROUPS),
        endpoint="tcp://127.0.0.1:0",
        replay_endpoint="tcp://127.0.0.1:0",
        topic="kv",
        batches_max=2,
    )
    yield made
    made.close()


@pytest.fixture
def subscriber(log: KVEventLog, publisher: KVEventPublisher) -> Iterator[Subscriber]:
    made = Subscriber(publisher)
    for _ in range(500):  # until the subscription has arrived
        log.append(AllCleared())
        publisher.publish()
        if made.sub.poll(10):
            break
    while made.sub.poll(50):
        made.sub.recv_multipart()
    yield made
    made.context.destroy(linger=0)


def removed(number: int) -> BlocksRemoved:
    return BlocksRemoved(0, (number.to_bytes(32, "big"),))


def test_a_subscriber_gets_numbered_batches_and_replays(
    log: KVEventLog, publisher: KVEventPublisher, subscriber: Subscriber
) -> None:
    for number in (7, 8):
        log.append(removed(number))
        publisher.publish()
        publisher.publish()  # nothing new, nothing sent
    messages = [subscriber.read(), subscriber.read()]
    first = int.from_bytes(messages[0][1], "big")
    assert [(topic, int.from_bytes(n, "big")) for topic, n, _ in messages] == [
        (b"kv", first),
        (b"kv", first + 1),
    ]
    hashes = [msgpack.unpackb(payload)[1][0]["block_hashes"] for _, _, payload in messages]
    assert hashes == [[7], [8]]
    end = [b"", END_OF_REPLAY, b""]
    assert subscriber.ask(publisher, (0).to_bytes(8, "big")) == [*messages, end]
    assert subscriber.ask(publisher, messages[1][1]) == [messages[1], end]
    subscriber.dealer.send_multipart([b"", b"what"])  # no request: no answer, no harm
    assert subscriber.ask(publisher, messages[1][1]) == [messages[1], end]


def test_a_gap_in_the_log_clears_what_subscribers_know(
    log: KVEventLog, publisher: KVEventPublisher, subscriber: Subscriber
) -> None:
    for number in range(4):  # the log keeps three
        log.append(removed(number))
    publisher.publish()
    assert msgpack.unpackb(subscriber.read()[2])[1] == [{"type": "AllBlocksCleared"}]
    log.append(removed(9))
    publisher.publish()
    assert msgpack.unpackb(subscriber.read()[2])[1][0]["block_hashes"] == [9]


async def test_changes_are_published_as_they_come(
    log: KVEventLog, publisher: KVEventPublisher, subscriber: Subscriber
) -> None:
    changes = [asyncio.Event()]
    task = asyncio.create_task(publisher.run(lambda: changes[-1]))
    log.append(removed(5))
    changes.append(asyncio.Event())
    changes[0].set()
    message = await asyncio.to_thread(subscriber.read)
    assert msgpack.unpackb(message[2])[1][0]["block_hashes"] == [5]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_address_in_use_is_named(log: KVEventLog, publisher: KVEventPublisher) -> None:
    with pytest.raises(ConfigError, match="KV events: tcp://"):
        KVEventPublisher(log, VllmEventShape(GROUPS), endpoint=publisher.endpoint)
