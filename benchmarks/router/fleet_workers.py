"""Many workers without engines: ``python -m benchmarks.router.fleet_workers``.

All of them are served by this process. Each registers as a real one does, and tells its stats and
KV events as real ones do: busy ones have other stats whenever they are looked at, and a block more
and one less with each step of 50 ms. Its argument: JSON with the router's address, the number of
the first one, how many there are, whether they are busy, and whether they report at the router's
pace or as often as they would.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import grpc

from benchmarks.router.grpc_workers import BLOCK_TOKENS, InstantWorker, info_of
from disagg.kv.event_log import KVEventLog
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored
from disagg.messages.registration import WorkerInfo
from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram, WorkerStats
from disagg.messages.step_times import StepShape
from disagg.router.worker_metrics import COUNTERS, RESIDENCY
from disagg.scheduling.step_meter import StepMeter
from disagg.testing.scripted_worker import READY
from disagg.tls.connections import Connections
from disagg.wire.kv_events_codec import kv_batch_to_wire
from disagg.wire.session_batches import MESSAGES_MAX, batched, take
from disagg.wire.session_codec import session_request_from_wire, session_response_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from disagg.workers.channel import CHANNEL_OPTIONS
from disagg.workers.control import STATS_S
from disagg.workers.kv_event_stream import follow
from disagg.workers.registration import RouterAnswers, keep_registered
from disagg.workers.router_sessions import RouterSessions

ROLES = ("prefill", "decode")
EPOCH = "e1"
HEARTBEAT_MS = 1_000
STEP_S = 0.05
BLOCKS_KEPT = 64
STEP = StepShape(512, 4.0, 8, 16.0)


class Ignored(RouterAnswers):
    """Answers by which nobody goes: as workers were before routers asked for a pace."""

    @property
    def stats_ms(self) -> int:
        """None is asked for."""
        return 0

    def heartbeat_ms(self, address: str) -> int:
        """None is asked for."""
        return 0


class FleetWorker:
    """One of them.

    Attributes:
        sessions: with routers.
        answers: of routers, to its registrations.
        events: of its cache.
        changed: set, and replaced, with every step.
    """

    def __init__(self, *, paced: bool) -> None:
        self.sessions = RouterSessions(routers_max=8)
        self.answers = RouterAnswers() if paced else Ignored()
        self.events = KVEventLog(lambda: ((),), 1)
        self.changed = asyncio.Event()
        self._meter = StepMeter(512)
        self._numbers = count()
        counts = (9,) * (len(RESIDENCY_BOUNDS_MS) + 1)
        residency = tuple(ResidencyHistogram(name, counts, 9) for name in RESIDENCY)
        self._stats = replace(READY, num_blocks_free=100_000, residency=residency)

    def stats(self) -> WorkerStats:
        """Other ones than before."""
        number = next(self._numbers)
        self._meter.add(STEP, 10.0)
        counters = tuple((name, number) for name in COUNTERS)
        return replace(
            self._stats, num_running=number % 8, counters=counters, step_times=self._meter.times
        )

    async def report_forever(self, *, busy: bool) -> None:
        """As a worker's control does it."""
        stats = self.stats()
        while True:
            await asyncio.sleep(STATS_S)
            if busy:
                stats = self.stats()
            now_ms = time.monotonic_ns() // 1_000_000
            self.sessions.report(now_ms, stats, loaded=busy, pace_ms=self.answers.stats_ms)

    async def step_forever(self) -> None:
        """As an engine whose decodes end a block with every step, and push another one out."""
        known: deque[bytes] = deque()
        while True:
            await asyncio.sleep(STEP_S)
            known.append(os.urandom(32))
            self.events.append(BlocksStored(0, (known[-1],), None, 0, BLOCK_TOKENS))
            if len(known) > BLOCKS_KEPT:
                self.events.append(BlocksRemoved(0, (known.popleft(),)))
            self.changed.set()
            self.changed = asyncio.Event()


class FleetServicer(WorkerServicer):
    """The service of one of them."""

    def __init__(self, worker: FleetWorker) -> None:
        self._worker = worker

    async def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]
        """Tell what the worker's sessions are told."""
        opened = session_request_from_wire(await anext(aiter(request_iterator)), "")
        assert isinstance(opened, SessionOpen)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        await context.send_initial_metadata(())
        self._worker.sessions.open(opened.router_id, queue.put_nowait, lambda _: None)
        while True:
            taken = await take(queue, MESSAGES_MAX)
            for response in batched(map(session_response_to_wire, taken)):
                yield response

    async def KvEvents(self, request, context):  # type: ignore[no-untyped-def]
        """Follow them as a real service lets them be followed."""
        one = self._worker
        async for batch in follow(
            one.events, request.from_sequence, lambda: one.changed, lambda: one.answers.stats_ms
        ):
            yield kv_batch_to_wire(EPOCH, batch)

    async def Peer(self, request_iterator, context):  # type: ignore[no-untyped-def, override]
        """Nothing is handed over."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker without an engine")

    async def Status(self, request, context):  # type: ignore[no-untyped-def]
        """Nobody looks."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker without an engine")


def _same(info: WorkerInfo) -> WorkerInfo:
    return info


async def main(
    router_address: str, first: int, num_workers: int, *, busy: bool, paced: bool
) -> None:
    """Serve until the process is ended."""
    tasks: list[Awaitable[object]] = []
    for number in range(first, first + num_workers):
        worker = FleetWorker(paced=paced)
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        add_WorkerServicer_to_server(FleetServicer(worker), server)
        await server.start()
        info = replace(
            info_of(InstantWorker(ROLES[number % 2], 0.0), f"127.0.0.1:{port}"),
            incarnation=Incarnation(f"worker-{number}", EPOCH),
        )
        tasks.append(worker.report_forever(busy=busy))
        if busy:
            tasks.append(worker.step_forever())
        tasks.append(
            keep_registered(
                router_address, partial(_same, info), HEARTBEAT_MS, Connections(""), worker.answers
            )
        )
        tasks.append(server.wait_for_termination())
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    modes = {"busy": given["busy"], "paced": given["paced"]}
    asyncio.run(main(given["router"], given["first"], given["num"], **modes))
