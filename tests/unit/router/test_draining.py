"""A router that drains, and requests that their clients send again: over real HTTP and gRPC."""

import asyncio
import json

import grpc
import pytest

from disagg.router.dispatch import Dispatcher
from disagg.router.router_id import new_router_id
from disagg.wire.session_codec import session_request_from_wire
from disagg.wire.v1 import identity_pb2, router_pb2, session_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from tests.unit.router.test_http_errors import COMPLETION, check_error

STREAM = COMPLETION | {"stream": True}
NAMED = {"x-request-id": "again"}
DONE = "[DONE]"


async def events(response):
    data = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    return [one if one == DONE else json.loads(one) for one in data]


async def test_what_runs_goes_on_and_what_is_new_is_told_to_go_elsewhere(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(1)
    async with house.http.stream("POST", "/v1/completions", json=STREAM) as response:
        assert response.status_code == 200
        drain = asyncio.create_task(house.app.drain())
        await house.until(lambda: house.app.dispatcher.draining, "draining")
        refused = await house.http.post("/v1/completions", json=COMPLETION)
        check_error(refused, 503, None, "router_stopping")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        ready = await house.http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "stopping")
        assert (await house.http.get("/health")).status_code == 200
        async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
            call = RouterStub(channel).Generate(
                router_pb2.GenerateRequest(model="tiny", prompt="x")
            )
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()  # type: ignore[attr-defined]
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        for _ in range(9):
            worker.gate.release()
        assert (await events(response))[-1] == DONE
    await drain
    assert not len(house.app.dispatcher.open_answers)


async def test_a_worker_that_registers_while_it_drains_is_taken_in(house):
    """Those that run may need it."""
    house.app.dispatcher.drain()
    await house.add("late", until_ready=False)
    await house.until(lambda: len(house.app.dispatcher.core.fleet) == 2, "the late worker")


async def test_its_time_is_bounded(open_house):
    house = await open_house(drain_timeout_ms=50)
    worker = await house.add("w1", gate=asyncio.Semaphore(0))
    asked = asyncio.create_task(house.http.post("/v1/completions", json=COMPLETION))
    await worker.until(lambda: worker.submits, "the submit")
    await house.app.drain()
    assert len(house.app.dispatcher.open_answers) == 1
    await house.app.stop()
    check_error(await asked, 503, None, "router_stopping")


async def test_what_is_sent_again_takes_the_place_of_the_first(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    first = asyncio.create_task(house.http.post("/v1/completions", json=COMPLETION, headers=NAMED))
    await worker.until(lambda: worker.submits, "the first submit")
    second = asyncio.create_task(house.http.post("/v1/completions", json=COMPLETION, headers=NAMED))
    check_error(superseded := await first, 409, None, "superseded")
    assert superseded.headers["x-should-retry"] == "false", "or it would end what is served now"
    await worker.until(lambda: len(worker.submits) == 2, "the second submit")
    assert [one.key for one in worker.cancels] == [worker.submits[0].key]
    for _ in range(9):
        worker.gate.release()
    assert (await second).status_code == 200


async def test_a_stream_that_is_superseded_ends_with_an_error(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(1)
    async with house.http.stream("POST", "/v1/completions", json=STREAM, headers=NAMED) as first:
        second = asyncio.create_task(
            house.http.post("/v1/completions", json=COMPLETION, headers=NAMED)
        )
        last = (await events(first))[-1]
        assert last["error"]["code"] == "superseded"
        for _ in range(9):
            worker.gate.release()
        assert (await second).status_code == 200


async def test_claims_are_of_id_and_prompt(house):
    claims = []
    generate = Dispatcher.generate
    bodies = [COMPLETION, COMPLETION | {"max_tokens": 2}, COMPLETION | {"prompt": [5, 7]}]

    def noted(self, request, *more, **options):
        claims.append(request.claim)
        return generate(self, request, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "generate", noted)
        for headers in (NAMED, {"x-request-id": "other"}, {}):
            for body in bodies:
                await house.http.post("/v1/completions", json=body, headers=headers)
    assert claims[0] == claims[1] != claims[2]
    assert len(set(claims[:6])) == 4
    assert set(claims[6:]) == {b""}, "without an id there is no name"


def test_router_ids_are_new_at_every_start_and_of_signs_that_workers_take() -> None:
    ids = {new_router_id(name) for name in ("", "", "router-0", "router-0")}
    assert len(ids) == 4
    for one in ids:
        worker = identity_pb2.Incarnation(worker_id="w", epoch="e")
        opening = session_pb2.SessionOpen(router_id=one, worker=worker)
        session_request_from_wire(session_pb2.SessionRequest(open=opening))
