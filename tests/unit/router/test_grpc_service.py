"""The router's gRPC service over plain gRPC."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from disagg.messages import kv_events
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVSnapshot
from disagg.router.request_preparation import Preparation
from disagg.testing.scripted_worker import HASHER
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.v1 import registration_pb2, router_pb2, sampling_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from tests.unit.router.scripted_worker import BOUND_S, stored

PROMPT = list(range(10, 22))


@pytest.fixture
async def stub(house):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        yield RouterStub(channel)


def chain(tokens, salt=b""):
    hashes: list[bytes] = []
    HASHER.extend(hashes, tokens, salt)
    return hashes


async def test_generate_streams_tokens_text_and_logprobs(house, stub):
    sampling = sampling_pb2.SamplingParams(max_tokens=9, top_p=1.0, num_logprobs=1, seed=3)
    request = router_pb2.GenerateRequest(
        request_id="g1", model="tiny", token_ids=[5, 6], sampling=sampling
    )
    answers = [answer async for answer in stub.Generate(request)]
    assert "".join(a.text for a in answers) == house.tokenizer.decode(house.script[:9])
    assert [t for a in answers for t in a.token_ids] == list(house.script[:9])
    assert [x for a in answers for x in a.logprobs] == [-0.5] * 9
    assert sum(len(a.top) for a in answers) == 9
    assert [a.finish_reason for a in answers][-1] == "length"
    assert {a.request_id for a in answers} == {"g1"}
    assert house.workers[0].submits[0].sampling.temperature == 0
    assert house.workers[0].submits[0].sampling.repetition_penalty == 1


async def test_generate_carries_penalties_and_bias(house, stub):
    sampling = sampling_pb2.SamplingParams(
        max_tokens=2,
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={7: -100, 5: 1.5},
    )
    request = router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6], sampling=sampling)
    assert [answer async for answer in stub.Generate(request)]
    carried = house.workers[0].submits[0].sampling
    assert (carried.min_p, carried.presence_penalty, carried.frequency_penalty) == (0.25, -1, 2)
    assert carried.repetition_penalty == 1.5
    assert carried.logit_bias == ((5, 1.5), (7, -100))
    assert carried.num_prompt_tokens == 2


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"prompt": "both"}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": [999]}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"request_id": "bad id"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (
            {"sampling": sampling_pb2.SamplingParams(temperature=5)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(temperature=float("nan"))},
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(repetition_penalty=0)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "repetition_penalty",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(presence_penalty=float("inf"))},
            grpc.StatusCode.INVALID_ARGUMENT,
            "presence_penalty",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(min_p=1.5)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "min_p",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(logit_bias={-1: 1.0})},
            grpc.StatusCode.INVALID_ARGUMENT,
            "logit_bias",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(logit_bias={1: float("nan")})},
            grpc.StatusCode.INVALID_ARGUMENT,
            "logit_bias",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(num_prompt_tokens=1)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.num_prompt_tokens",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(grammar="nonsense")},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.grammar",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(num_logprobs=21)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "logprobs",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(max_tokens=600)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_tokens",
        ),
    ],
)
async def test_generate_refuses_with_the_field(house, stub, change, status, field):
    request = {"model": "tiny", "token_ids": [5, 6]} | change
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(router_pb2.GenerateRequest(**request)):
            pass
    assert caught.value.code() is status
    trailing: list[Any] = list(caught.value.trailing_metadata())
    assert ("disagg-field", field) in trailing
    assert (caught.value.details() or "").startswith(f"{field}: ")
    assert house.workers[0].submits == []


async def test_a_malformed_registration_is_the_fault_of_who_sent_it(house, stub):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Register(registration_pb2.RegisterRequest(address="127.0.0.1:1"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "RegisterRequest." in (refused.value.details() or "")


async def test_a_registration_is_answered_with_how_often_to_report(house, stub):
    request = worker_info_to_wire(house.workers[0].info)
    answer = await stub.Register(request)
    assert (answer.heartbeat_ms, answer.stats_ms) == (10, 4), "of one worker"
    for number in range(300):  # no session with any of them comes up
        info = replace(house.workers[0].info, incarnation=Incarnation(f"more-{number}", "e"))
        house.app.dispatcher.core.register(house.app.dispatcher.now_ms(), info)
    answer = await stub.Register(request)
    assert (answer.heartbeat_ms, answer.stats_ms) == (3_010, 1_000)


async def test_a_cancelled_generate_is_cancelled_at_the_worker(house, stub):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(2)
    call = stub.Generate(router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6]))
    assert (await call.read()).token_ids
    assert worker.cancels == []
    call.cancel()
    await worker.until(lambda: worker.cancels, "the cancel")


async def match(stub, tokens, salt=""):
    request = router_pb2.MatchRequest(model="tiny", token_ids=tokens, cache_salt=salt)
    answer = await stub.Match(request)
    assert answer.num_tokens == len(tokens)
    return [worker.usable_tokens for worker in answer.workers]


async def test_match_follows_the_kv_events_over_gaps_and_snapshots(house, stub):
    worker = house.workers[0]
    hashes = chain(PROMPT)
    assert len(hashes) == 3
    assert await match(stub, PROMPT) == [0]
    await worker.publish(stored(hashes[:1], first_sequence=0))
    await wait_match(stub, house, PROMPT, [4])
    # Events 1 to 4 are missing: nothing is believed, the stream is opened anew at 1.
    await worker.until(lambda: worker.kv_asked == [0], "the first stream")
    worker.kv_first = 1
    await worker.publish(stored(hashes[1:2], first_sequence=5))
    await worker.until(lambda: len(worker.kv_asked) > 1, "a new event stream")
    assert worker.kv_asked[1] == 1
    assert await match(stub, PROMPT) == [4]
    worker.kv_first = 2
    await worker.publish(KVSnapshot(6, (tuple(hashes[:2]),)))
    await wait_match(stub, house, PROMPT, [8])
    assert await match(stub, PROMPT, salt="another tenant") == [0]
    assert await match(stub, [*PROMPT[:4], 99, *PROMPT[5:]]) == [4]


async def test_a_snapshot_in_parts_is_taken_in_whole_or_asked_for_again(house, stub, monkeypatch):
    monkeypatch.setattr(kv_events, "PART_HASHES_MAX", 1)
    worker, longer = house.workers[0], [*PROMPT, 1]
    parts = list(KVSnapshot(6, (tuple(chain(PROMPT)),)).parts())
    assert len(parts) == 3
    await worker.publish(*parts[:2])
    await wait_match(stub, house, longer, [8])
    worker.kv_first = 2
    await worker.publish(stored(chain(PROMPT)[2:], first_sequence=6))
    await worker.until(lambda: len(worker.kv_asked) > 1, "a new event stream")
    assert worker.kv_asked[1] == 0, "not from 6 on: the last part is missing"
    worker.kv_first = 3
    await worker.publish(*parts)
    await wait_match(stub, house, longer, [12])
    await worker.publish(stored([b"n" * 32], first_sequence=6))
    await house.until(lambda: house.app.dispatcher.core.kv_sequence(worker.incarnation) == 7, "7")


async def wait_match(stub, house, tokens, expected):
    end = asyncio.get_running_loop().time() + BOUND_S
    while (found := await match(stub, tokens)) != expected:
        assert asyncio.get_running_loop().time() < end, f"not {expected} but {found}"
        await asyncio.sleep(0.005)


async def test_of_a_field_with_too_much_no_more_is_read_than_shows_it(house, stub, monkeypatch):
    asked: list[Any] = []
    prepare = Preparation.prepare

    async def spy(self, request, *more):
        asked.append(request)
        return await prepare(self, request, *more)

    monkeypatch.setattr(Preparation, "prepare", spy)
    many = 100_000
    for field, sampling in (
        ("token_ids", {}),
        ("stop_token_ids", {"stop_token_ids": [1] * many}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(many), 1.0)}),
    ):
        request = router_pb2.GenerateRequest(
            model="tiny",
            token_ids=[5] * (many if field == "token_ids" else 2),
            sampling=sampling_pb2.SamplingParams(**sampling),
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [_ async for _ in stub.Generate(request)]
        assert (refused.value.details() or "").startswith(f"{field}: ")
        one = asked.pop()
        given = one.prompt if field == "token_ids" else getattr(one, field)
        assert 100 < len(given) < 3000


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_of_two_keys_none_counts(stub, name):
    request = router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6])
    metadata = ((name, "Bearer one"), (name, "Bearer two"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [_ async for _ in stub.Generate(request, metadata=metadata)]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [_ async for _ in stub.Generate(request, metadata=metadata[:1])]
