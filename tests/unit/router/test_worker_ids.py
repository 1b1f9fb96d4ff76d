"""Two processes under one worker id: the one that lives goes on, and both are told."""

import asyncio
import logging
from dataclasses import replace

import grpc
import pytest

from disagg.messages.session import WorkerIdClaimed
from disagg.router.registrations import Refusals
from disagg.routing.fleet import WORKERS_MAX
from disagg.tls.connections import Connections
from disagg.workers.registration import RouterAnswers, keep_registered

NUM_TOKENS = 8
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": NUM_TOKENS, "temperature": 0}


async def test_a_live_worker_keeps_its_id_and_its_requests(house, caplog):
    holder = house.workers[0]
    holder.gate = asyncio.Semaphore(0)
    running = asyncio.create_task(house.http.post("/v1/completions", json=BODY))
    await holder.until(lambda: holder.submits, "the submit")
    with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.add("w1", epoch="e2")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    newcomer = house.workers[1]
    details = str(caught.value.details())
    assert holder.info.address in details
    assert newcomer.info.address in details
    assert any("'w1' is the worker of epoch e1" in line for line in caplog.messages)
    await holder.until(lambda: holder.claims, "the claim at the holder")
    (claim,) = holder.claims
    assert isinstance(claim, WorkerIdClaimed)
    assert claim.claimant.incarnation == newcomer.incarnation
    assert claim.claimant.address == newcomer.info.address
    for _ in range(NUM_TOKENS):
        holder.gate.release()
    response = await running
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == NUM_TOKENS
    text = (await house.admin.get("/metrics")).text
    assert (
        'disagg_routing_registrations_refused_total{cause="worker_id_taken",model_name="tiny"} 1.0'
        in text
    )


async def test_a_restart_gets_in_as_soon_as_the_session_has_ended(house):
    old = house.workers[0]
    await old.stop()  # as a process that has died
    await house.until(lambda: not house.app.dispatcher.core.fleet, "the loss")
    await house.add("w1", epoch="e2")
    assert house.workers[1].opened[0].worker.epoch == "e2"
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # what is left of the one before it
        await old.register(house.app.grpc_port)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize("epoch", ["e1", "e2"])
async def test_the_newcomer_says_it_as_an_error(house, caplog, epoch):
    """Once, although it tries with every heartbeat; the holder's own heartbeat is no error."""
    holder = house.workers[0].info
    info = replace(holder, incarnation=holder.incarnation._replace(epoch=epoch))
    address = f"127.0.0.1:{house.app.grpc_port}"
    with caplog.at_level(logging.INFO, logger="disagg.workers.registration"):
        answers = RouterAnswers()
        registering = keep_registered(address, lambda: info, 1, Connections(""), answers)
        trying = asyncio.create_task(registering)
        await house.until(lambda: caplog.records, "an answer")
        before = house.app.dispatcher.core.counters["registrations_refused", "worker_id_taken"]
        counters = house.app.dispatcher.core.counters
        if epoch != "e1":
            taken = "registrations_refused", "worker_id_taken"
            await house.until(lambda: counters[taken] > before + 2, "more tries")
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
    (said,) = [one for one in caplog.records if one.name == "disagg.workers.registration"]
    assert said.levelno == (logging.INFO if epoch == "e1" else logging.ERROR)
    assert ("ALREADY_EXISTS" in said.getMessage()) is (epoch != "e1")


def refusals_in(caplog):
    return [line for line in caplog.messages if line.startswith("registration of")]


async def test_workers_that_are_refused_by_turns_are_logged_once_each(house, caplog):
    """And again when one has been taken in meanwhile."""
    for _ in range(3):
        for worker_id in ("w2", "w3"):
            with pytest.raises(grpc.aio.AioRpcError):
                await house.add(worker_id, revision="no name")
    assert [line.split(":")[0] for line in refusals_in(caplog)] == [
        "registration of 'w2'",
        "registration of 'w3'",
    ]
    await house.add("w2")
    with pytest.raises(grpc.aio.AioRpcError):
        await house.add("w2", revision="no name")
    assert len(refusals_in(caplog)) == 3


def test_refusals_are_bounded_and_a_new_cause_is_news(caplog):
    refusals = Refusals("registration of %r: %s")
    for number in range(WORKERS_MAX + 1):
        refusals.refused(f"w{number}", "e1", "no room")
    refusals.refused("w1", "e1", "no room")
    assert len(refusals_in(caplog)) == WORKERS_MAX + 1
    refusals.refused("w1", "e1", "another model")
    refusals.refused("w0", "e1", "no room")  # forgotten
    assert len(refusals_in(caplog)) == WORKERS_MAX + 3


def test_who_claims_an_id_that_another_one_has_is_logged_once(caplog):
    """The holder registers between its tries."""
    refusals = Refusals("registration of %r: %s")
    for _ in range(4):
        refusals.taken_in("w1", "e1")
        refusals.refused("w1", "e2", "it is the worker of epoch e1")
    assert len(refusals_in(caplog)) == 1


async def test_a_worker_that_refuses_sessions_is_logged_once(house, caplog):
    """It registers with every heartbeat, and is dialled each time."""
    caplog.set_level(logging.INFO)

    worker = await house.add("w2")
    worker.refusal = "16 routers have sessions"
    caplog.clear()
    await worker.end_sessions()
    for number in range(3):
        await house.until(lambda: len(house.app.dispatcher.core.fleet) == 1, "the loss")
        await worker.register(house.app.grpc_port)
        await house.until(lambda n=number: worker.num_sessions == 2 + n, "a session")
        await house.until(lambda: len(house.app.dispatcher.core.fleet) == 1, "the refusal")
    refused = [line for line in caplog.messages if worker.refusal in line]
    joined = [line for line in caplog.messages if line.endswith("joined")]
    left = [line for line in caplog.messages if line.endswith("left")]
    assert (len(refused), len(joined), len(left)) == (1, 1, 1)
    worker.refusal = ""
    await worker.register(house.app.grpc_port)
    await house.until(
        lambda: sum(line.endswith("joined") for line in caplog.messages) == 2, "it is told"
    )
