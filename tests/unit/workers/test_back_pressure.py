"""Reads for which the transport has no room wait; nothing in the control dies in silence."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from opentelemetry.trace import NoOpTracer

from disagg.errors import CapacityError
from disagg.messages.identity import Incarnation, RequestKey
from disagg.transfer.actions import PostRead
from disagg.wire.stream_hello import PoolInfo
from disagg.workers import control as control_module
from disagg.workers import nixl_transport
from disagg.workers.control import Control
from disagg.workers.engines.native.paged_pool import region_of
from disagg.workers.nixl_transport import NixlTransport
from disagg.workers.request_trace import RequestTrace
from tests.unit.workers.test_ends import BOUND_S, until
from tests.unit.workers.test_sessions import NoPeers, new_core

OWNER = Incarnation("prefill", "P")
NUM_READS = 5


class FullTransport(NoPeers):
    """Takes a read now and then: each of the others is refused."""

    def __init__(self) -> None:
        self.room = 0
        self.taken: list[int] = []

    def read(self, read_id: int, peer: str, src: object, dst: object, parts: object) -> None:
        if not self.room:
            raise CapacityError("enough for now")
        self.room -= 1
        self.taken.append(read_id)


async def reads_taken(rooms: list[int]) -> list[list[int]]:
    """Read ids that a transport has, after each time that it has room for so many more."""
    core, transport, seen = new_core(), FullTransport(), []
    links = cast(Any, transport)
    control = Control(core, cast(Any, None), links, pytest.fail, RequestTrace(NoOpTracer()))
    control.start(links)
    posts = [PostRead(n, RequestKey("r", 1), OWNER, (n,), (n,)) for n in range(NUM_READS)]
    control._guard(lambda: posts)
    for room in rooms:
        transport.room = room
        await until(lambda: not transport.room or not control._transport.num_waiting)
        seen.append(list(transport.taken))
    await control.stop()
    return seen


def test_reads_that_the_transport_does_not_take_wait_in_order() -> None:
    """Once the worker took the refusal for a bug and ended."""
    assert asyncio.run(reads_taken([0, 2, 1, 9])) == [[], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4]]


class ReadsThatGoOn:
    """An agent whose reads end when they are told to."""

    info = PoolInfo(b"", 0, 8, 16, "DRAM", 0)
    done = threading.Event()

    def __init__(self, name: str, pool: object) -> None:
        self.num_made = 0

    def add_peer(self, name: str, info: PoolInfo) -> object:
        return object()

    def remove_peer(self, name: str, pool: object) -> None: ...

    def make_read(self, pool: object, src: object, dst: object) -> int:
        self.num_made += 1
        return self.num_made

    def post(self, handle: int) -> bool:
        return False

    def is_done(self, handle: int) -> bool:
        return self.done.is_set()

    def release(self, handle: int) -> None: ...

    def check(self) -> None: ...


def test_a_full_transport_refuses_reads_and_takes_them_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It failed them once, which spoke against the peer; peers can be removed all the same."""
    monkeypatch.setattr(nixl_transport, "NixlAgent", ReadsThatGoOn)
    monkeypatch.setattr(nixl_transport, "READS_MAX", NUM_READS)
    ended: list[tuple[int, str]] = []
    reported = threading.Condition()

    def on_read_done(read_id: int, error: str) -> None:
        with reported:
            ended.append((read_id, error))
            reported.notify_all()

    def wait_for(state: Callable[[], bool]) -> None:
        with reported:
            assert reported.wait_for(state, BOUND_S)

    pool = torch.zeros((8, 16), dtype=torch.int8)
    transport = NixlTransport("me", region_of(pool), on_read_done=on_read_done, handle_bytes_max=16)
    transport.add_peer("peer", [ReadsThatGoOn.info])
    for read_id in range(NUM_READS):
        transport.read(read_id, "peer", (1,), (1,))
    with pytest.raises(CapacityError, match="5 reads are waiting"):
        transport.read(NUM_READS, "peer", (1,), (1,))
    transport.remove_peer("nobody")
    ReadsThatGoOn.done.set()
    wait_for(lambda: len(ended) == NUM_READS)
    transport.read(NUM_READS, "peer", (1,), (1,))
    wait_for(lambda: len(ended) == NUM_READS + 1)
    assert ended == [(read_id, "") for read_id in range(NUM_READS + 1)]
    assert transport.close(BOUND_S)


async def failures(control: Control, said: list[str]) -> list[str]:
    control.start(cast(Any, NoPeers()))
    await until(lambda: bool(said))
    await control.stop()
    return said


def raise_(*_: object) -> None:
    raise RuntimeError("a bug")


def new_control(said: list[str]) -> Control:
    links = cast(Any, NoPeers())
    return Control(new_core(), cast(Any, None), links, said.append, RequestTrace(NoOpTracer()))


def test_stats_that_cannot_be_made_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the task ended, and the router kept the last ones for ever."""
    monkeypatch.setattr(control_module, "worker_stats", raise_)
    said: list[str] = []
    assert asyncio.run(failures(new_control(said), said)) == ["RuntimeError: a bug"]
    assert "the worker's core failed" in caplog.text


def test_a_tick_that_fails_outside_the_core_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    control = new_control(said)
    monkeypatch.setattr(control._transport, "check", raise_)
    assert asyncio.run(failures(control, said)) == ["RuntimeError: a bug"]
    assert "a task of the control failed" in caplog.text
