"""Messages of a session in batches: order, bounds, and who may be sent one."""

import asyncio

import pytest

from disagg.errors import ProtocolError
from disagg.messages.identity import RequestKey
from disagg.messages.session import Cancel, PrefillProgress
from disagg.wire.session_batches import BYTES_MAX, batched, take, unbatched
from disagg.wire.session_codec import (
    session_request_from_wire,
    session_request_to_wire,
    session_response_from_wire,
    session_response_to_wire,
)
from disagg.wire.v1 import session_pb2

KEY = RequestKey("r", 1, "router")
PROGRESS = [PrefillProgress(KEY, num) for num in range(1, 6)]


def received(messages: list[PrefillProgress]) -> list[session_pb2.SessionResponse]:
    """What the wire carries of them."""
    return [
        session_pb2.SessionResponse.FromString(one.SerializeToString())
        for one in batched(map(session_response_to_wire, messages))
    ]


def test_all_arrive_in_their_order_in_one() -> None:
    (batch,) = received(PROGRESS)
    assert [session_response_from_wire(one, "router") for one in unbatched(batch)] == PROGRESS


def test_one_alone_is_as_it_always_was() -> None:
    assert received(PROGRESS[:1]) == [session_response_to_wire(PROGRESS[0])]
    assert received([]) == []


def test_who_knows_no_batches_would_lose_messages() -> None:
    """Why they are for those only who said that they take them."""
    (batch,) = received(PROGRESS)
    assert session_response_from_wire(batch, "router") == PROGRESS[0]


def test_large_messages_are_not_joined() -> None:
    cancels = [Cancel(KEY, "x" * size) for size in (BYTES_MAX - 1000, 2000, 10, 3 * BYTES_MAX, 10)]
    batches = list(batched(map(session_request_to_wire, cancels)))
    found = [[session_request_from_wire(one, "router") for one in unbatched(b)] for b in batches]
    assert found == [cancels[:1], cancels[1:3], cancels[3:4], cancels[4:]]


def test_a_batch_of_batches_is_refused() -> None:
    (inner,) = batched(map(session_response_to_wire, PROGRESS))
    outer = session_response_to_wire(PROGRESS[0])
    outer.more.append(inner)
    with pytest.raises(ProtocolError, match="more"):
        list(unbatched(outer))


async def test_what_waits_is_taken_together_and_nothing_after_the_end() -> None:
    queue: asyncio.Queue[int | None] = asyncio.Queue()
    for item in (1, 2, 3, None, 4):
        queue.put_nowait(item)
    assert await take(queue, 2) == [1, 2]
    assert await take(queue, 9) == [3, None]
    waiting = asyncio.create_task(take(queue, 1))
    assert await waiting == [4]
    waiting = asyncio.create_task(take(queue, 9))
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.put_nowait(5)
    assert await waiting == [5]
