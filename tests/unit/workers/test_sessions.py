"""Sessions of routers at a worker: replaced by a later one, beside each other, bounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from opentelemetry.trace import NoOpTracer

from disagg.checking.explorer import worker_state
from disagg.checking.explorer.setting import Setting
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import (
    Cancel,
    ToRouterMessage,
    ToWorkerMessage,
    WorkerIdClaimed,
    receipt_of,
)
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.core import WorkerCore
from disagg.wire.session_batches import batched, unbatched
from disagg.wire.session_codec import session_request_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import kv_events_pb2, session_pb2, worker_pb2_grpc
from disagg.workers.control import Control
from disagg.workers.request_trace import RequestTrace
from disagg.workers.service import WorkerService
from tests.unit.scheduling.test_cache_reset import core_with, serve

ME = Incarnation("decode", "D")
PEER = PeerAddress(Incarnation("prefill", "P"), "127.0.0.1:1")
ROUTER, OTHER = "router:1", "router:2"
TIMEOUT_S = 60.0


class NoPeers:
    """Nobody to transfer with, and no READ that could fail."""

    failure = ""

    def connect(self, peer: Incarnation, address: str) -> None: ...

    def send(self, peer: Incarnation, message: object) -> None: ...


def new_core() -> WorkerCore:
    setting, hasher = Setting(num_blocks=8), BlockHasher(b"test", 1)
    layout = plan_layout(setting.specs)
    limits = worker_state.limits_of(setting)
    return worker_state.new_core(ME, layout, hasher, limits, setting.num_blocks)


def key_of(request_id: str, router: str = ROUTER) -> RequestKey:
    return RequestKey(request_id, 1, router)


def submit(request_id: str) -> Submit:
    return Submit(
        key_of(request_id), Role.DECODE, (5, 6), (), b"", SamplingParams(max_tokens=2), PEER
    )


class Session:
    """A router's end of a session."""

    def __init__(self, stub: Any, router: str = ROUTER, *, takes_batches: bool = False) -> None:
        self.router = router
        self._requests: asyncio.Queue[session_pb2.SessionRequest] = asyncio.Queue()
        opening = SessionOpen(router, ME, takes_batches)
        self._requests.put_nowait(session_request_to_wire(opening))
        self._call = stub.Session(self._send())

    async def _send(self) -> AsyncIterator[session_pb2.SessionRequest]:
        while True:
            yield await self._requests.get()

    def tell(self, message: ToWorkerMessage) -> None:
        self._requests.put_nowait(session_request_to_wire(message))

    async def read(self) -> session_pb2.SessionResponse:
        """What comes next."""
        async with asyncio.timeout(TIMEOUT_S):
            found: session_pb2.SessionResponse = await self._call.read()
            return found

    def tell_at_once(self, *messages: ToWorkerMessage) -> None:
        """Several in one message."""
        for batch in batched(map(session_request_to_wire, messages)):
            self._requests.put_nowait(batch)

    async def hears(self) -> bool:
        """Something; False at the end."""
        async with asyncio.timeout(TIMEOUT_S):
            return bool(await self._call.read())

    async def ends(self) -> str:
        """Hears the rest; the status and the reason at the end."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.hears():
                pass
        code, details = await self._call.code(), await self._call.details()
        return f"{code.name}: {details}"


@contextlib.asynccontextmanager
async def serving(core: WorkerCore, **options: Any) -> AsyncIterator[tuple[Any, Control]]:
    """A worker's service as a router reaches it, and its control."""
    links = cast(Any, NoPeers())
    trace = RequestTrace(NoOpTracer())
    control = Control(core, cast(Any, None), links, pytest.fail, trace, **options)
    server = grpc.aio.server()
    service = WorkerService(ME, lambda: "both", control, links)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    control.start(links)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield worker_pb2_grpc.WorkerStub(channel), control
    finally:
        await server.stop(0)
        await control.stop()


async def sequences_after_a_late_submit(
    monkeypatch: pytest.MonkeyPatch, *, end_old: bool
) -> set[RequestKey]:
    """An old session's submit comes when another session has been opened; then a new one's.

    Args:
        end_old: as it is; else the old stream goes on, as if its end were still on its way.
    """
    core = new_core()
    async with serving(core) as (stub, control):
        if not end_old:
            opened = control.open_session
            monkeypatch.setattr(
                control, "open_session", lambda send, end, router: opened(send, router=router)
            )
        old = Session(stub)
        assert await old.hears()
        old.tell(submit("before"))
        async with asyncio.timeout(TIMEOUT_S):
            while not core.sequences:
                await control.changed.wait()
        new = Session(stub)
        assert await new.hears()
        assert not core.sequences, "what the old session asked for ends"
        old.tell(submit("late"))
        ends = asyncio.create_task(old.ends())
        async with asyncio.timeout(TIMEOUT_S):
            while not ends.done() and not core.sequences:
                await asyncio.wait((ends,), timeout=0.01)
        new.tell(submit("after"))
        async with asyncio.timeout(TIMEOUT_S):
            while key_of("after") not in core.sequences:
                await control.changed.wait()
        keys = set(core.sequences)
        ends.cancel()
    return keys


@pytest.mark.parametrize("end_old", [True, False])
def test_a_replaced_session_starts_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch, end_old: bool
) -> None:
    kept = asyncio.run(sequences_after_a_late_submit(monkeypatch, end_old=end_old))
    assert kept == {key_of("after")}


async def first_answer_to_a_submit() -> object:
    """What a router hears first after a submit, which the core has not seen by then."""
    core = new_core()
    async with serving(core) as (_, control):
        heard: list[ToRouterMessage] = []
        seen: list[int] = []

        def hear(message: ToRouterMessage) -> None:
            heard.append(message)
            seen.append(len(core.sequences))

        control.open_session(hear, router=ROUTER)
        heard.clear()
        seen.clear()
        control.router_message(submit("r"))
        assert core.sequences
        control.close_session(hear, ROUTER)
    return heard[0], seen[0]


def test_a_submit_has_a_receipt_before_anything_is_computed_for_it() -> None:
    assert asyncio.run(first_answer_to_a_submit()) == (receipt_of(submit("r")), 0)


async def end_of_a_replaced_session() -> str:
    """What an old session that says nothing hears when another one is opened."""
    async with serving(new_core()) as (stub, _):
        old = Session(stub)
        assert await old.hears()
        assert await Session(stub).hears()
        return await old.ends()


def test_a_replaced_session_ends_with_a_reason() -> None:
    said = asyncio.run(end_of_a_replaced_session())
    assert said == "ABORTED: another session with this worker was opened"


async def end_of_a_session_that_opens_twice() -> str:
    async with serving(new_core()) as (stub, _):
        session = Session(stub)
        assert await session.hears()
        session.tell(cast(ToWorkerMessage, SessionOpen(ROUTER, ME)))
        return await session.ends()


def test_a_message_that_breaks_the_protocol_ends_the_session_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = asyncio.run(end_of_a_session_that_opens_twice())
    assert said == "INVALID_ARGUMENT: a session is opened once"
    assert "a session is opened once" in caplog.text


def test_control_without_the_check_the_late_submit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "in_session", lambda self, send, router: True)
    kept = asyncio.run(sequences_after_a_late_submit(monkeypatch, end_old=False))
    assert kept == {key_of("late"), key_of("after")}


async def told_of_a_claim() -> int:
    """What is counted when the router tells of another process with this worker's id."""
    core = new_core()
    async with serving(core) as (stub, control):
        session = Session(stub)
        assert await session.hears()
        session.tell(WorkerIdClaimed(PeerAddress(Incarnation("decode", "E"), "elsewhere:1")))
        async with asyncio.timeout(TIMEOUT_S):
            while not core.counters.counts.get("worker_id_claims"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the counter tells nobody
        assert control.core is core
    return core.counters.counts["worker_id_claims"]


def test_who_holds_a_claimed_id_warns_with_the_address(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(told_of_a_claim()) == 1
    assert any("epoch E at elsewhere:1" in line for line in caplog.messages)


# -- several routers ----------------------------------------------------------------------------


async def after_one_of_two_sessions_ended(how: str) -> set[RequestKey]:
    """Two routers submit under one request id; the first one's session ends."""
    core = new_core()
    async with serving(core) as (stub, control):
        one, other = Session(stub), Session(stub, OTHER)
        for session in (one, other):
            assert await session.hears()
            session.tell(submit("same"))
        async with asyncio.timeout(TIMEOUT_S):
            while len(core.sequences) < 2:
                await control.changed.wait()
        if how == "closed":
            one._call.cancel()
        else:
            one.tell(cast(ToWorkerMessage, SessionOpen(ROUTER, ME)))
        async with asyncio.timeout(TIMEOUT_S):
            while key_of("same") in core.sequences:
                await control.changed.wait()
        assert await other.hears(), "its session goes on"
        return set(core.sequences)


@pytest.mark.parametrize("how", ["closed", "broke the protocol"])
def test_a_session_that_ends_takes_only_its_routers_requests_along(how: str) -> None:
    assert asyncio.run(after_one_of_two_sessions_ended(how)) == {key_of("same", OTHER)}


async def cancel_of_anothers_request() -> set[RequestKey]:
    core = new_core()
    async with serving(core) as (stub, control):
        one, other = Session(stub), Session(stub, OTHER)
        assert await one.hears()
        assert await other.hears()
        one.tell(submit("mine"))
        async with asyncio.timeout(TIMEOUT_S):
            while not core.sequences:
                await control.changed.wait()
        other.tell(Cancel(key_of("mine"), "it names another router's id"))
        other.tell(submit("own"))  # behind it in the same stream
        async with asyncio.timeout(TIMEOUT_S):
            while key_of("own", OTHER) not in core.sequences:
                await control.changed.wait()
        return set(core.sequences)


def test_no_router_speaks_of_anothers_requests_whatever_it_says() -> None:
    kept = asyncio.run(cancel_of_anothers_request())
    assert kept == {key_of("mine"), key_of("own", OTHER)}


async def a_router_too_many() -> tuple[str, bool]:
    async with serving(new_core(), routers_max=1) as (stub, _):
        first = Session(stub)
        assert await first.hears()
        said = await Session(stub, OTHER).ends()
        again = Session(stub)  # the same router has its place
        return said, await again.hears()


def test_routers_are_bounded() -> None:
    said, again = asyncio.run(a_router_too_many())
    assert said == "RESOURCE_EXHAUSTED: 1 routers have sessions (worker.routers_max)"
    assert again


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a/b"])
def test_an_id_that_is_no_id_is_refused(bad: str) -> None:
    async def said() -> str:
        async with serving(new_core()) as (stub, _):
            return await Session(stub, bad).ends()

    assert not asyncio.run(said()).startswith("OK")


async def events_of_two(core: WorkerCore) -> list[tuple[int, int]]:
    """What a router hears that has heard nothing, and one that is further on."""
    async with serving(core) as (stub, _):
        starts = []
        for start in (0, core.kv.events.next_seq - 1):
            call = stub.KvEvents(kv_events_pb2.KvEventsRequest(from_sequence=start))
            async with asyncio.timeout(TIMEOUT_S):
                batch = await call.read()
            starts.append((batch.first_sequence, len(batch.events)))
            call.cancel()
        return starts


def test_every_router_follows_kv_events_from_where_it_is() -> None:
    core = core_with()
    serve(core, "a", range(16))
    num = core.kv.events.next_seq
    assert num > 1
    assert asyncio.run(events_of_two(core)) == [(0, num), (num - 1, 1)]


@pytest.mark.parametrize("takes_batches", [True, False])
async def test_submits_of_one_message_are_all_taken_and_answered(takes_batches: bool) -> None:
    """Their receipts, put out in one turn, go in one message to a router that takes that."""
    submits = [submit(str(number)) for number in range(3)]
    async with serving(new_core()) as (stub, _):
        router = Session(stub, takes_batches=takes_batches)
        router.tell_at_once(*submits)
        num_receipts: list[int] = []
        while sum(num_receipts) < 3:
            heard = [one.WhichOneof("message") for one in unbatched(await router.read())]
            if "progress" in heard:
                num_receipts.append(heard.count("progress"))
    assert num_receipts == ([3] if takes_batches else [1, 1, 1])
