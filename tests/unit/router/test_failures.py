"""Workers that are lost, misbehave, restart or do not fit."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import grpc
import pytest

from disagg.errors import ConfigError
from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.session import EndReason, PartEnded
from disagg.router.app import RouterApp
from disagg.router.grpc_service import DETAILS_MAX
from disagg.router.options import RouterOptions
from disagg.testing.scripted_worker import BLOCK_TOKENS, CONTRACT, HASH_KEY
from tests.unit.router.conftest import ROUTER

BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 12}


async def test_a_lost_workers_request_goes_on_elsewhere_without_gap_or_repetition(open_house):
    house = await open_house()
    gates = [asyncio.Semaphore(0), asyncio.Semaphore(0)]
    workers = [await house.add(f"w{i}", gate=gate) for i, gate in enumerate(gates)]
    request = asyncio.create_task(house.http.post("/v1/completions", json=BODY))
    await house.until(lambda: any(w.submits for w in workers), "a submit")
    users = [w for w in workers if w.submits]
    for gate in gates:
        for _ in range(4):
            gate.release()
    lost = users[0]
    await lost.until(lambda: lost.num_sent >= 1, "tokens before the loss")
    await lost.stop()
    for gate in gates:
        for _ in range(40):
            gate.release()
    answer = (await request).json()
    assert answer["choices"][0]["text"] == house.tokenizer.decode(house.script[:12])
    assert answer["usage"]["completion_tokens"] == 12
    other = next(w for w in workers if w is not lost)
    assert other.submits[-1].key.generation > users[0].submits[0].key.generation
    metrics = (await house.admin.get("/metrics")).text
    assert 'disagg_routing_replans_total{cause="worker_lost",model_name="tiny"} 1.0' in metrics
    assert f'worker="{lost.incarnation.worker_id}"' not in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_the_only_worker_lost_before_the_first_token_is_a_503(open_house, stream):
    house = await open_house()
    worker = await house.add(gate=asyncio.Semaphore(0))
    request = asyncio.create_task(
        house.http.post("/v1/completions", json=BODY | {"stream": stream})
    )
    await worker.until(lambda: worker.submits, "the submit")
    await worker.stop()
    response = await request
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unavailable"


async def test_the_only_worker_lost_in_mid_stream_ends_the_stream_with_an_error(open_house):
    house = await open_house()
    gate = asyncio.Semaphore(3)
    worker = await house.add(gate=gate)
    lines = []
    async with house.http.stream(
        "POST", "/v1/completions", json=BODY | {"stream": True}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
            if len(lines) == 1:  # which may carry all three tokens
                await worker.stop()
    assert "data: [DONE]" not in lines
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "worker_unavailable"
    assert all("choices" in line for line in lines[:-1])


async def test_a_rejected_request_is_the_callers_error(house):
    worker = house.workers[0]
    worker.misbehave = lambda submit: [PartEnded(submit.key, EndReason.REJECTED, "too odd")]
    response = await house.http.post("/v1/completions", json=BODY)
    assert response.status_code == 400
    assert "too odd" in response.json()["error"]["message"]


async def test_contradicting_tokens_are_never_an_answer(house):
    def contradict(submit):
        start = len(submit.token_ids)
        outputs = (
            SequenceOutput(submit.key, start, (7, 8)),
            SequenceOutput(submit.key, start + 1, (9,), (), FinishReason.STOP),
        )
        return [StepOutputs(outputs)]

    house.workers[0].misbehave = contradict
    response = await house.http.post("/v1/completions", json=BODY)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "protocol_error"


async def test_no_progress_is_a_504(open_house):
    house = await open_house(request_timeout_ms=300)
    worker = await house.add(gate=asyncio.Semaphore(0))
    response = await house.http.post("/v1/completions", json=BODY)
    assert response.status_code == 504
    await worker.until(lambda: worker.cancels, "the cancel")


async def test_an_ended_session_is_opened_anew_by_the_next_heartbeat(house):
    worker = house.workers[0]
    await worker.end_sessions()
    await house.until(lambda: not house.app.dispatcher.core.fleet, "the loss")
    assert (await house.http.get("/ready")).status_code == 503
    await worker.register(house.app.grpc_port)
    await house.until(lambda: house.app.dispatcher.ready, "ready again")
    await worker.until(lambda: len(worker.opened) == 2, "the second session")
    assert worker.opened[0].worker == worker.incarnation
    assert (await house.http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_worker_of_another_model_is_refused_by_name(house):
    scheme = BlockHasher(block_hash_key(HASH_KEY, "other"), BLOCK_TOKENS).scheme
    other = replace(CONTRACT, model_fingerprint="other", hash_scheme=scheme)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.add("w2", contract=other)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "model_fingerprint" in (caught.value.details() or "")
    trailing: list[Any] = list(caught.value.trailing_metadata())
    assert ("disagg-field", "contract") in trailing
    assert len(house.app.dispatcher.core.fleet) == 1


async def test_who_cannot_exchange_kv_is_refused_and_both_contracts_are_logged_once(house, caplog):
    other = replace(house.workers[0].script.contract, layout_version=2)
    for _ in range(3):  # as often as it tries
        with pytest.raises(grpc.aio.AioRpcError, match="layout_version: 2 != 0"):
            await house.add("w2", contract=other)
    (said,) = [r.getMessage() for r in caplog.records if "cannot exchange KV" in r.getMessage()]
    assert said.count("Contract(") == 2
    with pytest.raises(grpc.aio.AioRpcError, match="layout_version") as caught:
        await house.add("w3", contract=replace(other, groups=("x" * 20_000,)))
    assert len(caught.value.details() or "") == DETAILS_MAX  # gRPC takes no more, the log does
    assert "x" * 20_000 in caplog.text
    assert len(house.app.dispatcher.core.fleet) == 1


async def test_a_worker_of_another_layout_may_serve_alone(open_house, caplog):
    house = await open_house(accept_unlike_workers=True)
    await house.add()
    ours = house.workers[0].script.contract
    await house.add("w2", contract=replace(ours, layout_version=2))
    (said,) = [r.getMessage() for r in caplog.records if "nothing is handed over" in r.getMessage()]
    assert "layout_version: 2 != 0" in said
    assert said.count("Contract(") == 2
    caplog.clear()
    await house.add("w3", contract=replace(ours))  # not with w2
    (said,) = [r.getMessage() for r in caplog.records if "nothing is handed over" in r.getMessage()]
    assert said.startswith("contracts of w3 and w2 differ")


async def test_a_silent_worker_is_dropped(open_house):
    house = await open_house(worker_silent_ms=1_000)
    worker = await house.add(until_ready=False)  # which it may be for less than a look
    await worker.until(lambda: bool(worker.opened), "the session")
    await house.until(lambda: not house.app.dispatcher.core.fleet, "dropped")


async def test_stop_cancels_what_lives_and_answers_it(open_house):
    house = await open_house()
    worker = await house.add(gate=asyncio.Semaphore(0))
    request = asyncio.create_task(house.http.post("/v1/completions", json=BODY))
    await worker.until(lambda: worker.submits, "the submit")
    await house.app.stop()
    assert (await request).status_code == 503
    await worker.until(lambda: worker.cancels, "the cancel")


async def test_a_taken_port_is_a_config_error(house, model_dir):
    for taken in ("http_port", "admin_port", "grpc_port"):
        options = ROUTER | {taken: getattr(house.app, taken)}
        app = RouterApp(RouterOptions(str(model_dir), "tiny", **options))
        with pytest.raises(ConfigError) as caught:
            await app.start()
        assert caught.value.param == taken
