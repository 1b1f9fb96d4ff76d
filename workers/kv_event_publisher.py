"""Publishes a worker's KV events to subscribers that expect vLLM's ZeroMQ stream.

Frames as in vLLM 0.33.0: PUB sends ``[topic, sequence number, payload]``, the number as 8 bytes
big-endian, one per batch. A replay socket (ROUTER) answers a request ``[sequence number]`` with
``[topic, sequence number, payload]`` for each batch kept from there on, and ends with an empty
topic, number -1 and an empty payload.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq

from disagg.errors import ConfigError
from disagg.kv.event_log import KVEventLog
from disagg.kv.event_publishing import VllmEventShape
from disagg.messages.kv_events import (
    AllCleared,
    KVEvent,
    TierCleared,
    TierRemoved,
    TierStored,
)

TIER_EVENTS = (TierStored, TierRemoved, TierCleared)
"""What subscribers who hash tokens could make nothing of."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_POLL_S = 0.1
REPLAYS_PER_TURN = 4
LONG_MAP = b"\xde"


class KVEventPublisher:
    """Sends the events of a coordinator's log, never waiting for a subscriber.

    To be used on the control thread only. Whoever reads too slowly loses messages (ZeroMQ's high
    water mark), sees a gap in the numbers and requests a replay.

    Args:
        log: the coordinator's log; it must carry token ids (``events_with_tokens``).
        shape: from events to payloads.
        endpoint: address that PUB binds to, e.g. ``tcp://0.0.0.0:5557``; port 0 is any free one.
        replay_endpoint: address of the replay socket, "" for none.
        topic: first frame of every message.
        batches_max: batches kept for replay.
        queued_max: messages queued for one subscriber.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self,
        log: KVEventLog,
        shape: VllmEventShape,
        *,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        batches_max: int = 10_000,
        queued_max: int = 100_000,
    ) -> None:
        self._log = log
        self._shape = shape
        self._topic = topic.encode()
        self._next_event = log.next_seq
        self._next_batch = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=batches_max)
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, endpoint, queued_max)
            # Room for a whole replay and its end, sent without waiting.
            self._replay = (
                self._bind(zmq.ROUTER, replay_endpoint, 2 * (batches_max + 1))
                if replay_endpoint
                else None
            )
        except ConfigError:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Address to which subscribers connect."""
        return _address(self._pub)

    @property
    def replay_endpoint(self) -> str:
        """Address for requests of a replay; "" where there is none."""
        return "" if self._replay is None else _address(self._replay)

    def publish(self) -> None:
        """Send what the log has since the last call, as one batch.

        If the log no longer reaches back so far, subscribers get an event that clears all.
        """
        batch = self._log.since(self._next_event)
        events: Sequence[KVEvent] = (AllCleared(),) if batch is None else batch.events
        events = [event for event in events if not isinstance(event, TIER_EVENTS)]
        self._next_event = self._log.next_seq
        if not events:
            return
        payload = pack_batch(self._shape.batch(time.time(), events))
        number, self._next_batch = self._next_batch, self._next_batch + 1
        self._kept.append((number, payload))
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def answer_replays(self) -> None:
        """Answer the requests that wait, a bounded number of them."""
        for _ in range(REPLAYS_PER_TURN):
            if self._replay is None or not self._replay.poll(0):
                return
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a request; its sender gets no answer, as at the peer
            reader, _, first = frames
            for number, payload in [k for k in self._kept if k[0] >= int.from_bytes(first, "big")]:
                self._answer(reader, self._topic, number.to_bytes(8, "big"), payload)
            self._answer(reader, b"", END_OF_REPLAY, b"")

    async def run(self, changed: Callable[[], asyncio.Event]) -> None:
        """Publish whenever the state changed, until cancelled; ``changed`` names the next event."""
        while True:
            event = changed()
            self.publish()
            self.answer_replays()
            try:
                await asyncio.wait_for(event.wait(), REPLAY_POLL_S if self._replay else None)
            except TimeoutError:
                continue

    def close(self) -> None:
        """Close the sockets; what is queued is lost."""
        self._context.destroy(linger=0)

    def _answer(self, reader: bytes, *frames: bytes) -> None:
        assert self._replay is not None
        try:
            self._replay.send_multipart([reader, b"", *frames], zmq.NOBLOCK)
        except zmq.Again:
            return  # it does not read: its replay ends without the end marker

    def _bind(self, kind: int, endpoint: str, queued_max: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(queued_max)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"KV events: {endpoint}: {error}", param="endpoint") from error
        return socket


def pack_batch(batch: Sequence[Any]) -> bytes:
    """Msgpack as vLLM's encoder writes it, to the byte.

    Its stored event is declared with sixteen fields, so it carries the long map header however
    few of them are sent.
    """
    packer = msgpack.Packer()
    time_s, events, rank = batch
    parts = [packer.pack_array_header(3), packer.pack(time_s)]
    parts.append(packer.pack_array_header(len(events)))
    for event in events:
        is_stored = event["type"] == "BlockStored"
        parts.append(
            LONG_MAP + len(event).to_bytes(2, "big")
            if is_stored
            else packer.pack_map_header(len(event))
        )
        parts += [packer.pack(item) for pair in event.items() for item in pair]
    parts.append(packer.pack(rank))
    return b"".join(parts)


def _address(socket: zmq.Socket[bytes]) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
