"""Registers the worker at all its routers, again and again: one that restarted learns of it."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import grpc

from disagg.messages.registration import WorkerInfo
from disagg.tls.connections import Connections
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.v1 import registration_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from disagg.workers.channel import CHANNEL_OPTIONS
from disagg.workers.router_discovery import RouterDiscovery

if TYPE_CHECKING:
    from disagg.wire.v1.router_pb2_grpc import RouterAsyncStub  # only in the stub file

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0
BACK_OFF_MAX = 8
"""A router that is away is tried again after up to so many heartbeats, but within
`BACK_OFF_MAX_S`: it may be back at any moment."""
BACK_OFF_MAX_S = 5.0
HEARTBEAT_MS_MAX = 10_000
STATS_MS_MAX = 1_000
"""What a router asks for is done up to here: other routers go by the same stats."""


@dataclass(slots=True)
class RouterAnswers:
    """What routers said last when the worker registered, each by its address."""

    refusals: dict[str, str] = field(default_factory=dict)
    """Why it has not registered it; "" where it has."""
    paces: dict[str, registration_pb2.RegisterResponse] = field(default_factory=dict)
    """How often it wants to hear from the worker."""

    @property
    def stats_ms(self) -> int:
        """Between two stats, as the router wants it that wants fewest; 0: nobody cares."""
        return min(STATS_MS_MAX, max((one.stats_ms for one in self.paces.values()), default=0))

    def heartbeat_ms(self, address: str) -> int:
        """Between two registrations with a router; 0: it does not care."""
        pace = self.paces.get(address)
        return min(HEARTBEAT_MS_MAX, pace.heartbeat_ms) if pace is not None else 0

    def forget(self, address: str) -> None:
        """A router has gone."""
        self.refusals.pop(address, None)
        self.paces.pop(address, None)


async def keep_registered_everywhere(
    discovery: RouterDiscovery,
    info: Callable[[], WorkerInfo],
    heartbeat_ms: int,
    discovery_ms: int,
    connections: Connections,
    answers: RouterAnswers,
) -> None:
    """Register with every router for ever, as they come and go, each time with what ``info`` says.

    One that is not found any more, as a replica that is about to end, is registered with until it
    is gone: its requests are still served. What each of them answers is kept in ``answers``.
    """
    tasks: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            await discovery.look_up()
            for address in [one for one, task in tasks.items() if task.done()]:
                tasks.pop(address).result()  # an exception is a bug, and ends the worker
            for address in discovery.found - tasks.keys():
                finds = partial(discovery.finds, address)
                registering = keep_registered(
                    address, info, heartbeat_ms, connections, answers, finds
                )
                tasks[address] = asyncio.create_task(registering, name=f"router {address}")
            await asyncio.sleep(discovery_ms / 1000)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def keep_registered(
    address: str,
    info: Callable[[], WorkerInfo],
    heartbeat_ms: int,
    connections: Connections,
    answers: RouterAnswers,
    is_found: Callable[[], bool] = lambda: True,
) -> None:
    """Register with one router until it is away and not found any more; log what changes.

    Its last answer is kept in ``answers``.
    """
    logged, num_failures = "", 0
    while True:
        certificate = connections.certificate
        async with connections.channel(address, CHANNEL_OPTIONS) as channel:
            stub = cast("RouterAsyncStub", RouterStub(channel))
            # A channel keeps the certificate it was made with.
            while certificate is connections.certificate:
                answer = await _register(
                    stub, worker_info_to_wire(info()), secured=certificate is not None
                )
                pace = answer.pace
                num_failures = 0 if pace is not None else num_failures + 1
                answers.refusals[address] = answer.said if num_failures else ""
                if pace is not None:
                    answers.paces[address] = pace
                if answer.said != logged:
                    log.log(answer.level, "router %s: %s", address, answer.said)
                    logged = answer.said
                if num_failures and not is_found():
                    answers.forget(address)
                    return
                if not answer.is_late or num_failures > 1:
                    asked_ms = 0 if num_failures else answers.heartbeat_ms(address)
                    await asyncio.sleep(pause_s(max(heartbeat_ms, asked_ms) / 1000, num_failures))
                if answer.is_late:
                    # Of several processes on one port only this one may stand still: another
                    # connection may lead to another one, before all take this worker for lost.
                    break


def pause_s(heartbeat_s: float, num_failures: int) -> float:
    """Until the next try: a heartbeat, longer after failures in a row, never the same for all."""
    if not num_failures:
        return heartbeat_s
    longest = max(heartbeat_s, min(BACK_OFF_MAX_S, heartbeat_s * BACK_OFF_MAX))
    pause = min(longest, heartbeat_s * float(2 ** min(num_failures - 1, 10)))
    return pause * random.uniform(0.5, 1.0)


class _Answer(NamedTuple):
    level: int
    said: str
    """To be logged at that level."""
    pace: registration_pb2.RegisterResponse | None = None
    """None: not registered."""
    is_late: bool = False
    """None came in time."""


async def _register(
    stub: "RouterAsyncStub", request: registration_pb2.RegisterRequest, *, secured: bool
) -> _Answer:
    """Register once."""
    try:
        pace = await stub.Register(request, timeout=REGISTER_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        said = f"not registered: {error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            return _Answer(logging.ERROR, said)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            # Refused handshakes look like a router that is away.
            said += (
                " (if it runs: are both certificates of one authority, see cluster.tls_directory?"
                " Does the network let packets of full size through (MTU)?)"
                if secured
                else " (if it runs: has it a certificate, and this worker none?)"
            )
        if is_late := error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            said = (
                f"not registered: no answer within {REGISTER_TIMEOUT_S:g} s: it stands still,"
                " or the network loses what it or this worker sends"
            )
        return _Answer(logging.WARNING, said, is_late=is_late)
    return _Answer(logging.INFO, "registered", pace)
