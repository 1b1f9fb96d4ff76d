"""An exception in one of the router's own tasks: logged, counted, and then restarted or the end."""

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from disagg.router import ticker
from disagg.router.app import RouterApp
from disagg.router.options import RouterOptions
from disagg.router.process import serve
from disagg.router.request_spans import RequestSpans
from disagg.routing.core import RouterCore
from tests.unit.router.conftest import ROUTER
from tests.unit.router.scripted_worker import BOUND_S, stored
from tests.unit.router.test_generation import BODY
from tests.unit.router.test_grpc_service import PROMPT, chain


class Failing:
    """Stands before a function and raises while ``num`` lasts."""

    def __init__(self, function, num):
        self.function, self.num, self.num_raised = function, num, 0

    def __call__(self, *args):
        if self.num_raised < self.num:
            self.num_raised += 1
            raise KeyError("a bug of ours")
        return self.function(*args)


async def failures(house, task):
    lines = (await house.admin.get("/metrics")).text.splitlines()
    name = f'disagg_router_task_failures_total{{task="{task}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def test_a_failed_tick_is_counted_and_the_next_one_comes(open_house, monkeypatch, caplog):
    house = await open_house(worker_silent_ms=1_000)
    core = house.app.dispatcher.core
    tick = Failing(core.tick, 3)
    monkeypatch.setattr(core, "tick", tick)
    worker = await house.add(until_ready=False)
    await worker.until(lambda: bool(worker.opened), "the session")
    await house.until(lambda: not core.fleet, "the silent worker dropped")
    assert tick.num_raised == 3
    assert await failures(house, "tick") == 3
    assert "tick failed, 3 in a row" in caplog.text
    assert not house.app.dispatcher.broken.is_set()


async def test_why_a_silent_worker_is_lost_is_told_with_what_to_look_at(open_house, caplog):
    house = await open_house(worker_silent_ms=300, worker_silent_busy_ms=300)
    await house.add("w7")  # it sends no heartbeats
    await house.until(lambda: not house.app.dispatcher.core.fleet, "the silent worker dropped")
    (line,) = [one for one in caplog.messages if "taken for lost" in one]
    assert "worker w7 " in line
    assert "router.worker_silent_ms" in line


async def test_a_clock_that_is_set_is_told_once_and_ends_no_wait(open_house, monkeypatch, caplog):
    house = await open_house()
    dispatcher = house.app.dispatcher
    begun_ms, wall_s = dispatcher.now_ms(), time.time
    for ahead_s, said in ((-7200, "-7200.0 s"), (0, "+0.0 s")):
        caplog.clear()
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: wall_s() + ahead_s)
        for _ in range(3):
            dispatcher._tick()
        (line,) = [one for one in caplog.messages if "clock was set" in one]
        assert said in line
        assert 0 <= dispatcher.now_ms() - begun_ms < 1000 * BOUND_S


@pytest.mark.parametrize("set_by_s", [-7200, 7200])
async def test_spans_are_as_long_as_requests_after_the_clock_was_set(house, monkeypatch, set_by_s):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    dispatcher = house.app.dispatcher
    spans = RequestSpans(provider.get_tracer("test"), "tiny")
    monkeypatch.setattr(dispatcher.observers, "spans", spans)
    began_ns = time.time_ns() - 10**6  # the router counts in milliseconds
    monkeypatch.setattr(dispatcher, "_wall_offset_ms", dispatcher._wall_offset_ms - 1000 * set_by_s)
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
    assert (await house.http.post("/v1/completions", json=body)).status_code == 200
    await house.until(lambda: len(exporter.get_finished_spans()) == 2, "both spans")
    ended_ns = time.time_ns()
    for span in exporter.get_finished_spans():
        assert span.start_time is not None
        assert span.end_time is not None
        assert began_ns <= span.start_time <= span.end_time <= ended_ns, span.to_json()


async def num_late(house):
    """Turns of the event loop that came more than 0.1 s late."""
    counts = {}
    for line in (await house.admin.get("/metrics")).text.splitlines():
        if line.startswith("disagg_router_event_loop_lag_seconds") and "model_name" in line:
            name, _, count = line.rpartition(" ")
            counts[name.partition("seconds")[2]] = float(count)
    in_time = [count for name, count in counts.items() if 'le="0.1"' in name]
    return max(counts.values(), default=0) - sum(in_time)


async def test_how_long_streams_stood_still_is_measured(house):
    before = await num_late(house)
    time.sleep(ticker.TICK_S + 0.15)  # noqa: ASYNC251 - what a router must not do
    async with asyncio.timeout(BOUND_S):
        while await num_late(house) <= before:
            pass


async def test_who_stood_still_hears_what_has_come_before_it_judges_anybody():
    order = []
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def hear():
        await reader.read(1)
        for _ in range(10):  # as many turns as a message takes through gRPC and a session
            await asyncio.sleep(0)
        order.append("heard")

    ticked = asyncio.Event()

    def tick():
        order.append("tick")
        ticked.set()

    metrics: Any = SimpleNamespace(lagged=lambda late_s: None)
    tasks = [
        asyncio.create_task(hear()),
        asyncio.create_task(ticker.tick_forever(tick, metrics, tick)),
    ]
    await asyncio.sleep(0)
    theirs.send(b"1")
    time.sleep(2 * ticker.STOOD_STILL_S)  # noqa: ASYNC251 - the router stands still
    async with asyncio.timeout(BOUND_S):
        await ticked.wait()
    assert order == ["heard", "tick"]
    for task in tasks:
        task.cancel()
    writer.close()
    theirs.close()


async def test_a_router_whose_ticks_never_succeed_ends(model_dir, monkeypatch):
    monkeypatch.setattr(ticker, "TICK_S", 0.001)
    tick = Failing(None, 10**9)
    monkeypatch.setattr(RouterCore, "tick", tick)
    app = RouterApp(RouterOptions(str(model_dir), "tiny", **ROUTER))
    serving = asyncio.create_task(serve(app))
    async with asyncio.timeout(BOUND_S):
        assert await serving == 1
    assert tick.num_raised == ticker.TICK_FAILURES_MAX


async def test_a_failed_kv_event_is_counted_and_the_stream_opened_anew(house, monkeypatch, caplog):
    core, worker, hashes = house.app.dispatcher.core, house.workers[0], chain(PROMPT)
    revision = core.assign("r")
    follow = Failing(core.kv_events, 1)
    monkeypatch.setattr(core, "kv_events", follow)
    await worker.publish(stored(hashes))
    await house.until(
        lambda: [one.usable_tokens for one in core.match(revision, len(PROMPT), hashes)] == [8],
        "the blocks in the index",
    )
    assert follow.num_raised == 1
    assert len(worker.kv_asked) == 2
    assert await failures(house, "kv_events") == 1
    assert "kv_events of w1 failed" in caplog.text
    assert len(worker.opened) == 1  # the session lived on


async def test_a_failed_message_ends_the_session_and_the_next_one_serves(house, monkeypatch):
    core, worker = house.app.dispatcher.core, house.workers[0]
    monkeypatch.setattr(core, "from_worker", Failing(core.from_worker, 1))
    assert (await house.http.post("/v1/completions", json=BODY)).status_code == 503
    await house.until(lambda: not core.fleet, "the loss")
    await worker.register(house.app.grpc_port)
    await house.until(lambda: house.app.dispatcher.ready, "ready again")
    assert await failures(house, "session") == 1
    assert (await house.http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_message_that_cannot_be_written_ends_the_session(house, monkeypatch):
    core, worker = house.app.dispatcher.core, house.workers[0]
    [session] = house.app.dispatcher.sessions
    session.send("no message at all")
    await house.until(lambda: not core.fleet, "the loss")
    await worker.register(house.app.grpc_port)
    await house.until(lambda: house.app.dispatcher.ready, "ready again")
    assert await failures(house, "session") == 1


async def test_a_loss_that_cannot_be_handled_ends_the_router(house, monkeypatch):
    core, worker = house.app.dispatcher.core, house.workers[0]
    monkeypatch.setattr(core, "session_lost", Failing(core.session_lost, 1))
    await worker.end_sessions()
    async with asyncio.timeout(BOUND_S):
        await house.app.dispatcher.broken.wait()
    assert await failures(house, "session") == 1


@pytest.mark.parametrize("error", [None, OSError("no more sockets")])
@pytest.mark.parametrize("server", ["_http_server", "_admin_server"])
async def test_an_http_server_that_ends_ends_the_router(open_house, monkeypatch, server, error):
    house = await open_house()

    async def end():
        if error is not None:
            raise error
        return True

    # uvicorn's main loop looks at this ten times a second.
    monkeypatch.setattr(getattr(house.app, server), "on_tick", lambda counter: end())
    async with asyncio.timeout(BOUND_S):
        await house.app.dispatcher.broken.wait()
