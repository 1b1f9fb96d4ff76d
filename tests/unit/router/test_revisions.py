"""Revisions through the real router: operators see and weigh them, requests stay within theirs."""

import asyncio
import json
import shutil
from dataclasses import replace
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from disagg.commands.main import app as command
from disagg.commands.router_client import call_router
from disagg.errors import RequestError
from disagg.grammar.tokenizer_digest import tokenizer_digest
from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.testing.scripted_worker import CONTRACT, HASH_KEY
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.v1.router_pb2_grpc import RouterStub

PATH = "/v1/disagg/revisions"
HASHER = BlockHasher(block_hash_key(HASH_KEY, "another"), 2)
OTHER = replace(
    CONTRACT, model_fingerprint="another", hash_block_tokens=2, hash_scheme=HASHER.scheme
)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
async def both(open_house):
    """Two revisions whose workers answer different tokens."""
    house = await open_house(revision_weights=("old=1", "new=0"))
    await house.add("w1", revision="old", token=lambda p: 40)
    new = {"contract": OTHER, "max_model_tokens": 100, "token": lambda p: 41}
    await house.add("w2", revision="new", **new)
    return house


async def ask(house, request_id="r", **changed):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "return_token_ids": True}
    return await house.http.post(
        "/v1/completions", json=body | changed, headers={"X-Request-Id": request_id}
    )


async def answered(house, request_id="r"):
    """The tokens, and the revision of the record."""
    answer = await ask(house, request_id)
    assert answer.status_code == 200, answer.text
    record = (await house.admin.get(f"/v1/disagg/requests/{request_id}")).json()
    return answer.json()["choices"][0]["token_ids"], record["revision"]


async def weigh(house, **weights):
    return await house.admin.put(PATH, json={"weights": weights})


async def test_traffic_moves_without_a_restart(both):
    assert await answered(both, "a") == ([40] * 3, "old")
    assert (await weigh(both, new=1)).status_code == 200
    assert await answered(both, "b") == ([41] * 3, "new")
    submitted = both.workers[1].submits[0]
    assert list(submitted.hashes) == hashes_of(HASHER)
    assert (await weigh(both)).json()["weights"] == {}
    seen = {(await answered(both, f"equal-{n}"))[1] for n in range(20)}
    assert seen == {"old", "new"}


def hashes_of(hasher):
    hashes: list[bytes] = []
    hasher.extend(hashes, PROMPT)
    return hashes


async def test_the_page_tells_what_is_there(both):
    await answered(both)
    body = (await both.admin.get(PATH)).json()
    assert body["weights"] == {"old": 1.0, "new": 0.0}
    new, old = body["revisions"]
    assert (old["name"], old["weight"], old["num_requests"]) == ("old", 1.0, 1)
    assert (new["name"], new["num_workers_ready"], new["num_requests"]) == ("new", 1, 0)
    assert (new["model_fingerprint"], new["max_model_tokens"]) == ("another", 100)
    metrics = (await both.admin.get("/metrics")).text
    assert 'disagg_revision_requests_total{revision="old"} 1.0' in metrics
    assert 'disagg_revision_weight{revision="new"} 0.0' in metrics
    (model,) = (await both.http.get("/v1/models")).json()["data"]
    assert (model["revisions"], model["max_model_len"]) == (["old"], 512)
    await weigh(both, old=1, new=1)
    (model,) = (await both.http.get("/v1/models")).json()["data"]
    assert (model["revisions"], model["max_model_len"]) == (["new", "old"], 100)
    workers = (await both.admin.get("/v1/disagg/workers")).json()["workers"]
    assert [view["info"]["revision"] for view in workers] == ["old", "new"]


async def test_limits_are_those_of_the_requests_revision(both):
    assert (await ask(both, max_tokens=200)).status_code == 200
    await weigh(both, new=1)
    refused = await ask(both, max_tokens=200)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "exceed 100" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], "body"),
        ({}, "weights"),
        ({"weights": {"new": 1}, "more": 1}, "more"),
        ({"weights": [1]}, "weights"),
        ({"weights": {"new": -1}}, "weights"),
        ({"weights": {"new": True}}, "weights.new"),
        ({"weights": {"new": "1"}}, "weights.new"),
        ({"weights": {"a b": 1}}, "weights"),
        ({"weights": {"new": 0}}, "weights"),
        ({"weights": {"newer": 1}}, "weights"),
    ],
)
async def test_weights_that_cannot_be_used_change_nothing(both, body, param):
    refused = await both.admin.put(PATH, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await both.admin.get(PATH)).json()["weights"] == {"old": 1.0, "new": 0.0}


async def test_the_prompts_of_one_request_are_served_by_one_revision(both):
    await weigh(both, old=1, new=1)
    for _ in range(8):
        body = {"model": "tiny", "prompt": [PROMPT] * 4, "max_tokens": 1, "return_token_ids": True}
        answer = (await both.http.post("/v1/completions", json=body)).json()
        assert len({choice["token_ids"][0] for choice in answer["choices"]}) == 1


async def test_a_stream_ends_with_an_error_when_its_revision_has_gone(open_house):
    house = await open_house(revision_weights=("old=1", "new=0"), replans_max=5)
    gate = asyncio.Semaphore(1)
    old = await house.add("w1", revision="old", token=lambda p: 40, gate=gate)
    await house.add("w2", revision="new", contract=OTHER, token=lambda p: 41)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    events = []
    async with house.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                if len(events) == 1:
                    await weigh(house, old=1, new=1)
                    await old.stop()
    assert "no worker is ready in revision 'old'" in json.loads(events[-1])["error"]["message"]
    assert house.workers[1].submits == []


async def test_what_has_no_token_yet_is_served_by_another_revision(open_house):
    """Of the workers' two block sizes each gets the names of its own."""
    house = await open_house(revision_weights=("old=1", "new=0"), replans_max=5)
    old = await house.add("w1", revision="old", token=lambda p: 40, gate=asyncio.Semaphore(0))
    new = await house.add("w2", revision="new", contract=OTHER, token=lambda p: 41)
    asked = asyncio.create_task(ask(house))
    await old.until(lambda: old.submits, "the submit")
    await weigh(house, old=1, new=1)
    await old.stop()
    answer = await asked
    assert answer.json()["choices"][0]["token_ids"] == [41] * 3
    assert list(new.submits[0].hashes) == hashes_of(HASHER) != list(old.submits[0].hashes)


async def test_a_new_contract_takes_the_place_of_one_that_has_gone(house):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await house.add("w2", contract=OTHER)
    assert "Another model.revision" in str(refused.value.details())
    await house.workers[0].stop()
    await house.until(lambda: not house.app.dispatcher.core.fleet, "the loss")
    await house.workers[1].register(house.app.grpc_port)
    await house.until(lambda: house.app.dispatcher.core.ready, "the new one")
    assert (await ask(house)).status_code == 200
    assert list(house.workers[1].submits[0].hashes) == hashes_of(HASHER)


async def test_another_tokenizer_is_refused_and_named(open_house, model_dir, tmp_path):
    house = await open_house()
    await house.add("w1", tokenizer_digest=tokenizer_digest(model_dir))
    changed = shutil.copytree(model_dir, tmp_path / "changed")
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await house.add("w2", revision="v2", tokenizer_digest=tokenizer_digest(changed))
    assert "another tokenizer or vocabulary" in str(refused.value.details())
    assert "w2" in str(refused.value.details())
    await house.add("w3")  # of a release that does not say


def test_how_a_tokenizer_is_written_does_not_matter(model_dir, tmp_path):
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    told = json.loads((copy / "tokenizer.json").read_text())
    reordered = dict(reversed(told.items())) | {"truncation": {"max_length": 3}}
    (copy / "tokenizer.json").write_text(json.dumps(reordered, indent=7))
    assert tokenizer_digest(copy) == tokenizer_digest(model_dir) != ""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 1}))
    assert tokenizer_digest(copy) != tokenizer_digest(model_dir)
    (copy / "tokenizer.json").unlink()
    assert tokenizer_digest(copy) == ""


async def test_a_name_that_is_none_is_refused(house):
    info = replace(house.workers[0].info, revision="a b")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        stub: Any = RouterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="revision"):
            await stub.Register(worker_info_to_wire(info))


async def test_the_command_lists_and_sets(both):
    url = str(both.admin.base_url).rstrip("/")
    run = CliRunner().invoke

    async def said(*arguments):
        given = ["revisions", *arguments, "--url", url]
        return await asyncio.to_thread(run, command, given)

    listed = await said("list")
    assert listed.exit_code == 0
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert rows[1][:3] == ["new", "0", "1/1"]
    assert rows[2][:3] == ["old", "1", "1/1"]
    result = await said("set", "old=90", "new=10", "--json")
    assert json.loads(result.stdout)["routers"][url]["weights"] == {"old": 90.0, "new": 10.0}
    with pytest.raises(RequestError, match="no request would be served"):
        await asyncio.to_thread(
            call_router, url, PATH, 5, scope="administer", put={"weights": {"typo": 1}}
        )
    assert (await both.admin.get(PATH)).json()["weights"] == {"old": 90.0, "new": 10.0}
