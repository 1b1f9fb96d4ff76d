"""Where a worker finds routers, and how it registers with them as they come and go."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract, GroupInfo, WorkerInfo
from disagg.testing.scripted_worker import HASH_KEY
from disagg.tls.connections import Connections
from disagg.wire.v1 import registration_pb2, router_pb2_grpc
from disagg.workers import registration, router_discovery
from disagg.workers.actor import why_unregistered
from disagg.workers.options import WorkerOptions
from disagg.workers.registration import (
    BACK_OFF_MAX_S,
    STATS_MS_MAX,
    RouterAnswers,
    keep_registered_everywhere,
    pause_s,
)
from disagg.workers.router_discovery import RouterDiscovery
from disagg.workers.worker import Worker
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.lone_worker import NoTransport

NAME = "routers.test"
BOUND_S = 60.0
INFO = WorkerInfo(
    Incarnation("w", "e"),
    "127.0.0.1:1",
    "both",
    "m",
    Contract("model", "float32", ("full",), "pages", 2, 1, "scheme", 1, 1),
    (GroupInfo("full_attention", 1, 0, 1, 2),),
    8,
    8,
    8,
)


class Names:
    """What a name resolves to, as DNS would say it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: tuple[str, ...] = ()
        self.fails = False
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, port: Any, *args: Any, **named: Any) -> Any:
            if host != NAME:
                return real(host, port, *args, **named)
            if self.fails:
                raise socket.gaierror("no answer")
            return [entry for one in self.addresses for entry in real(one, port, *args, **named)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def found(discovery: RouterDiscovery) -> list[str]:
    asyncio.run(discovery.look_up())
    return sorted(discovery.found)


def test_all_addresses_of_a_name_beside_a_list_and_the_cluster(names: Names) -> None:
    names.addresses = ("127.0.0.2", "127.0.0.3", "::1")
    sources = ("127.0.0.9:1", f"dns:{NAME}:5", "ray")
    discovery = RouterDiscovery(sources, lambda: ["127.0.0.8:7"])
    assert found(discovery) == [
        "127.0.0.2:5",
        "127.0.0.3:5",
        "127.0.0.8:7",
        "127.0.0.9:1",
        "[::1]:5",
    ]
    names.addresses = ("127.0.0.3", "127.0.0.4")
    assert found(discovery)[:2] == ["127.0.0.3:5", "127.0.0.4:5"], "it follows changes"


def test_a_source_that_fails_keeps_what_it_said(names: Names) -> None:
    names.addresses = ("127.0.0.2",)
    known: list[str] = ["127.0.0.8:7"]

    def cluster() -> list[str]:
        if not known:
            raise RuntimeError("Ray is away")
        return list(known)

    discovery = RouterDiscovery((f"dns:{NAME}:5", "ray"), cluster)
    before = found(discovery)
    names.fails = True
    known.clear()
    assert found(discovery) == before
    names.fails, names.addresses = False, ()
    assert found(discovery) == ["127.0.0.8:7"], "an answer that is empty is an answer"


def test_addresses_are_bounded(
    names: Names, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_discovery, "ADDRESSES_MAX", 4)
    names.addresses = tuple(f"127.0.0.{n}" for n in range(2, 8))
    with caplog.at_level(logging.INFO):
        assert len(found(RouterDiscovery((f"dns:{NAME}:5",)))) == 4
    assert "6 addresses, the first 4 are taken" in caplog.text


def test_a_worker_outside_a_cluster_finds_nobody_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert found(RouterDiscovery(("ray",))) == []
    assert "belongs to no cluster" in caplog.text


class RouterService(router_pb2_grpc.RouterServicer):
    """Counts registrations; asks for a pace."""

    def __init__(self) -> None:
        self.num_registered = 0
        self.answer = registration_pb2.RegisterResponse(heartbeat_ms=10)
        self.connections: list[str] = []
        """On which registrations came."""
        self.stands_still = False

    async def Register(
        self,
        request: registration_pb2.RegisterRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> registration_pb2.RegisterResponse:
        self.connections.append(context.peer())
        if self.stands_still:
            await asyncio.Event().wait()
        self.num_registered += 1
        return self.answer

    def Generate(self, request: object, context: object) -> Any:
        raise NotImplementedError

    async def Match(self, request: object, context: object) -> Any:
        raise NotImplementedError


@contextlib.asynccontextmanager
async def router_at(host: str, port: int = 0) -> AsyncIterator[tuple[RouterService, int]]:
    server, service = grpc.aio.server(), RouterService()
    router_pb2_grpc.add_RouterServicer_to_server(service, server)
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield service, port
    finally:
        await server.stop(0)


async def until(state: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while not state():  # noqa: ASYNC110 - of servers and logs, which tell nobody
            await asyncio.sleep(0.01)
    assert state(), what


async def registered_as_routers_come_and_go(names: Names, logged: Callable[[], str]) -> None:
    async with router_at("127.0.0.2") as (first, port):
        names.addresses = ("127.0.0.2", "127.0.0.3")
        discovery = RouterDiscovery((f"dns:{NAME}:{port}",))
        router_answers = RouterAnswers()
        answers = router_answers.refusals
        assert why_unregistered(answers) == "it knows of no router"
        registering = keep_registered_everywhere(
            discovery, lambda: INFO, 20, 20, Connections(""), router_answers
        )
        task = asyncio.create_task(registering)
        await until(lambda: first.num_registered > 1, "registered, again and again")
        await until(lambda: len(answers) == 2, "the one that is away has been asked")
        assert why_unregistered(answers) == "", "one is enough"
        async with router_at("127.0.0.3", port) as (second, _):
            await until(lambda: second.num_registered > 0, "one that was away is tried again")
            names.addresses = ("127.0.0.3",)
            await until(lambda: discovery.found == {f"127.0.0.3:{port}"}, "the change")
            before = first.num_registered
            await until(lambda: first.num_registered > before + 2, "it still serves, and is told")
    away = [f"router 127.0.0.{n}:{port}: not registered" for n in (2, 3)]
    await until(lambda: all(logged().count(one) for one in away), "both to be missed")
    assert not task.done(), "that routers are away ends nothing"
    await until(lambda: why_unregistered(answers) != "", "no router has it")
    assert f"router 127.0.0.3:{port}: not registered: " in why_unregistered(answers)
    assert f"127.0.0.2:{port}" not in answers, "it is not found any more"
    async with router_at("127.0.0.2", port) as (back, _), router_at("127.0.0.3", port) as (kept, _):
        await until(lambda: kept.num_registered > 0, "the one that is found")
        assert not back.num_registered, "not found any more, and was away: it is left alone"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_every_router_is_registered_with_as_they_come_and_go(
    names: Names, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "REGISTER_TIMEOUT_S", 1.0)
    asyncio.run(registered_as_routers_come_and_go(names, lambda: caplog.text))


async def registered_beside_one_that_stands_still(names: Names) -> None:
    """Of several processes on one port a connection stays with the one it came to."""
    async with router_at("127.0.0.2") as (router, port):
        names.addresses = ("127.0.0.2",)
        discovery = RouterDiscovery((f"dns:{NAME}:{port}",))
        registering = keep_registered_everywhere(
            discovery, lambda: INFO, 20, 20, Connections(""), RouterAnswers()
        )
        task = asyncio.create_task(registering)
        await until(lambda: router.num_registered > 2, "registered, again and again")
        assert len(set(router.connections)) == 1, "on one connection, while it answers"
        router.stands_still = True
        await until(lambda: len(set(router.connections)) > 1, "another connection")
        router.stands_still = False
        before = router.num_registered
        await until(lambda: router.num_registered > before + 2, "registered again")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_router_that_stands_still_is_asked_on_another_connection(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "REGISTER_TIMEOUT_S", 1.0)
    asyncio.run(registered_beside_one_that_stands_still(names))


async def registered_with_one_that_answers_nobody(names: Names, paused: list[int]) -> None:
    async with router_at("127.0.0.2") as (router, port):
        router.stands_still = True
        names.addresses = ("127.0.0.2",)
        discovery = RouterDiscovery((f"dns:{NAME}:{port}",))
        registering = keep_registered_everywhere(
            discovery, lambda: INFO, 20, 20, Connections(""), RouterAnswers()
        )
        task = asyncio.create_task(registering)
        await until(lambda: len(paused) > 1, "asked again and again")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_router_that_answers_nobody_is_asked_ever_more_seldom(
    names: Names, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have too much to do: a new connection of every worker is more of it."""
    paused: list[int] = []

    def pause_s(heartbeat_s: float, num_failures: int) -> float:
        paused.append(num_failures)
        return 0.0

    monkeypatch.setattr(registration, "REGISTER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(registration, "pause_s", pause_s)
    asyncio.run(registered_with_one_that_answers_nobody(names, paused))
    assert paused[:2] == [2, 3]
    assert "no answer within 0.1 s: it stands still, or the network loses" in caplog.text


async def registered_as_often_as_asked(names: Names) -> None:
    async with router_at("127.0.0.2") as (busy, port), router_at("127.0.0.3", port) as (idle, _):
        names.addresses = ("127.0.0.2", "127.0.0.3")
        busy.answer = registration_pb2.RegisterResponse(heartbeat_ms=60_000, stats_ms=700)
        idle.answer = registration_pb2.RegisterResponse(stats_ms=300)
        answers = RouterAnswers()
        assert answers.stats_ms == 0, "nobody has asked yet"
        discovery = RouterDiscovery((f"dns:{NAME}:{port}",))
        registering = keep_registered_everywhere(
            discovery, lambda: INFO, 20, 20, Connections(""), answers
        )
        task = asyncio.create_task(registering)
        await until(lambda: idle.num_registered > 10, "who asks for nothing hears as ever")
        assert busy.num_registered == 1
        assert answers.stats_ms == 700, "who has most workers says how often"
        idle.answer = registration_pb2.RegisterResponse(stats_ms=1 << 31)
        await until(lambda: answers.stats_ms > 700, "another answer")
        assert answers.stats_ms == STATS_MS_MAX, "no router makes a worker fall silent"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_router_says_how_often_it_wants_to_hear(names: Names) -> None:
    asyncio.run(registered_as_often_as_asked(names))


async def pace_of_a_workers_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_at("127.0.0.1") as (router, port):
        router.answer = registration_pb2.RegisterResponse(stats_ms=700)
        worker = Worker(
            WorkerOptions(*("w", "both", "", "digest", (f"127.0.0.1:{port}",)), hash_key=HASH_KEY),
            engine_factory=lambda _: DigestEngine(8),
            transport_factory=lambda *_: cast(Any, NoTransport()),
        )
        await asyncio.to_thread(worker.start)
        paces: list[int] = []
        assert worker.control is not None
        report = worker.control._sessions.report

        def noted(*args: Any, pace_ms: int, **options: Any) -> None:
            paces.append(pace_ms)
            report(*args, pace_ms=pace_ms, **options)

        monkeypatch.setattr(worker.control._sessions, "report", noted)
        await until(lambda: 700 in paces, "reports at the router's pace")
        assert await asyncio.to_thread(worker.stop)


def test_a_worker_reports_at_its_routers_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(pace_of_a_workers_reports(monkeypatch))


def test_who_is_away_is_tried_less_and_less_often_up_to_a_bound() -> None:
    assert pause_s(1.0, 0) == 1.0
    for num_failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, BACK_OFF_MAX_S), (99, 5.0)):
        pauses = [pause_s(1.0, num_failures) for _ in range(50)]
        assert longest / 2 <= min(pauses)
        assert max(pauses) <= longest
        assert len(set(pauses)) > 1, "never the same for all workers"
    assert pause_s(60.0, 50) >= 30.0, "a rare heartbeat is not made more frequent"
