"""Who may do what at the router's ports, and what of one tenant another one meets: nothing."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import grpc
import openai
import pytest

from disagg.kv.hashing import BlockHasher, block_hash_key, tenant_salt
from disagg.router.callers import NOBODY, Caller
from disagg.router.keys import hash_of, new_key
from disagg.router.metrics import TENANT_LABELS_MAX, Metrics
from disagg.router.ports import REGISTRATION_BYTES_MAX
from disagg.testing.scripted_worker import BLOCK_TOKENS, CONTRACT, HASHER
from disagg.wire.v1 import router_pb2, sampling_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from tests.unit.router.conftest import ROUTER
from tests.unit.router.scripted_worker import stored
from tests.unit.router.test_keys import entry, file_of

PROMPT = list(range(10, 22))
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
KEYS = {name: new_key() for name in ("alice", "alice2", "bob", "grafana", "root", "revoked")}
FILE = file_of(
    entry("alice", "alice", ("serve",), KEYS["alice"]),
    entry("alice2", "alice", ("observe",), KEYS["alice2"]),
    entry("bob", "bob", ("serve",), KEYS["bob"]),
    entry("grafana", "ops", ("observe",), KEYS["grafana"]),
    entry("root", "ops", ("admin",), KEYS["root"]),
).decode()
REVISIONS = "/v1/disagg/revisions"
SERVE, RECORD, RESET = "/v1/completions", "/v1/disagg/requests/unknown", "/reset_prefix_cache"


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"} | more


@pytest.fixture
async def locked(open_house):
    """A router with keys, and one ready worker."""
    house = await open_house(api_keys=FILE)
    await house.add(prompt=len(PROMPT))
    return house


async def ask(house, name: str, request_id: str = "", **changed):
    headers = bearer(name) | ({"x-request-id": request_id} if request_id else {})
    response = await house.http.post(SERVE, json=BODY | changed, headers=headers)
    assert response.status_code == 200, response.text
    return response


def admin_record(house, name: str, request_id: str):
    return house.admin.get(f"/v1/disagg/requests/{request_id}", headers=bearer(name))


# --- who may do what


@pytest.mark.parametrize(
    ("port", "method", "path", "allowed", "status"),
    [
        ("http", "POST", SERVE, {"alice", "bob"}, 200),
        ("http", "GET", "/v1/models", {"alice", "bob"}, 200),
        ("http", "GET", "/v1/models/tiny", {"alice", "bob"}, 200),
        ("admin", "GET", "/metrics", {"alice2", "grafana", "root"}, 200),
        ("admin", "GET", "/v1/disagg/workers", {"alice2", "grafana", "root"}, 200),
        ("admin", "GET", "/v1/disagg/queues", {"alice2", "grafana", "root"}, 200),
        ("admin", "POST", RESET, {"root"}, 200),
        ("admin", "GET", REVISIONS, {"alice2", "grafana", "root"}, 200),
        ("admin", "PUT", REVISIONS, {"root"}, 400),  # without a body
        ("admin", "PUT", "/v1/disagg/drain", {"root"}, 400),  # likewise
        ("admin", "GET", RECORD, {"alice", "alice2", "bob", "grafana", "root"}, 404),
        ("http", "GET", "/v1/nothing", {"alice", "alice2", "bob", "grafana", "root"}, 404),
        ("http", "GET", SERVE, {"alice", "alice2", "bob", "grafana", "root"}, 405),
    ],
)
async def test_each_page_has_its_scopes(locked, port, method, path, allowed, status):
    client = getattr(locked, port)
    content = BODY if path == SERVE and method == "POST" else None
    for name in KEYS:
        response = await client.request(method, path, json=content, headers=bearer(name))
        error: Any = response.json().get("error") if response.status_code >= 400 else None
        if name == "revoked":
            assert response.status_code == 401, (name, response.text)
            assert response.headers["www-authenticate"] == 'Bearer realm="disagg"'
            assert error["code"] == "invalid_api_key"
        elif name in allowed:
            assert response.status_code == status, (name, response.text)
            assert "www-authenticate" not in response.headers
        else:
            assert response.status_code == 403, (name, response.text)
            assert 'error="insufficient_scope"' in response.headers["www-authenticate"]
            assert error["code"] == "insufficient_permissions"
        if error:
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
    response = await client.request(method, path, json=content)
    assert response.status_code == 401  # also where there is no such page
    assert "Authorization: Bearer" in response.json()["error"]["message"]


async def test_a_stranger_reaches_neither_worker_nor_body(locked):
    assert (await locked.http.post(SERVE, json=BODY)).status_code == 401
    assert (await locked.http.post(SERVE, content=b"{")).status_code == 401
    assert locked.workers[0].submits == []
    metrics = (await locked.admin.get("/metrics", headers=bearer("grafana"))).text
    assert (
        'disagg_requests_total{model_name="tiny",outcome="invalid_api_key",tenant=""} 2.0'
        in metrics
    )


async def test_the_openai_client_is_admitted_and_refused_as_by_openai(locked):
    for key, expected in ((KEYS["alice"], None), ("sk-none", openai.AuthenticationError)):
        async with openai.AsyncOpenAI(
            base_url=f"{locked.url}/v1", api_key=key, max_retries=0
        ) as api:
            if expected is None:
                assert (await api.completions.create(**BODY)).choices[0].text
                continue
            with pytest.raises(expected) as caught:
                await api.completions.create(**BODY)
            assert caught.value.code == "invalid_api_key"
    response = await locked.http.post(SERVE, json=BODY, headers={"x-api-key": KEYS["bob"]})
    assert response.status_code == 200


async def test_probes_need_no_key_and_learn_little(locked):
    for path in ("/health", "/ready"):
        for client in (locked.http, locked.admin):
            for headers in ({}, bearer("revoked"), bearer("alice")):
                response = await client.get(path, headers=headers)
                assert response.status_code == 200
                assert set(response.json()) == {"status", "ready"}
            told = (await client.get(path, headers=bearer("grafana"))).json()
            assert (told["num_workers"], told["model"]) == (1, "tiny")  # control


async def test_no_key_is_in_logs_records_metrics_or_errors(locked, caplog):
    caplog.set_level(logging.DEBUG)
    told = []
    for name in KEYS:
        headers = bearer(name, **{"x-request-id": f"id-{name}"})
        told.append(await locked.http.post(SERVE, json=BODY, headers=headers))
        told.append(await locked.admin.get("/metrics", headers=bearer(name)))
        told.append(await locked.admin.get(f"/v1/disagg/requests/id-{name}", headers=bearer(name)))
        told.append(await locked.admin.get("/v1/disagg/workers", headers=bearer(name)))
    texts = "\n".join([*(one.text + str(one.headers) for one in told), caplog.text])
    assert sum(one.status_code == 200 for one in told) >= 8  # control: there was something to see
    secrets = [*KEYS.values(), *map(hash_of, KEYS.values()), ROUTER["hash_key"]]
    assert [secret for secret in secrets if secret in texts] == []


# --- records


async def test_a_record_is_its_tenants_and_an_admins(locked):
    await ask(locked, "alice", "mine")
    unknown = await admin_record(locked, "bob", "nothing")
    foreign = await admin_record(locked, "bob", "mine")
    assert unknown.status_code == foreign.status_code == 404
    assert foreign.text == unknown.text.replace("nothing", "mine")
    named = await locked.admin.get("/v1/disagg/requests/mine?tenant=alice", headers=bearer("bob"))
    assert named.text == foreign.text
    observer = await locked.admin.get(
        "/v1/disagg/requests/mine?tenant=alice", headers=bearer("grafana")
    )
    assert observer.status_code == 404
    for name in ("alice", "alice2"):  # another key of the same tenant
        assert (await admin_record(locked, name, "cmpl-mine")).json()["request_id"] == "mine"
    assert (await admin_record(locked, "root", "mine")).status_code == 404  # not the admin's own
    of_alice = await locked.admin.get(
        "/v1/disagg/requests/mine?tenant=alice", headers=bearer("root")
    )
    assert of_alice.json()["request_id"] == "mine"
    # Not by the name within the router, either.
    for given in ("alice/mine", "%61lice/mine", "../alice/mine"):
        assert (await admin_record(locked, "bob", given)).status_code == 404


async def test_equal_ids_of_two_tenants_are_two_requests(locked):
    worker = locked.workers[0]
    worker.gate = asyncio.Semaphore(0)
    first = asyncio.create_task(ask(locked, "alice", "same"))
    await worker.until(lambda: worker.submits, "alice's submit")
    second = asyncio.create_task(ask(locked, "bob", "same", max_tokens=2))
    await worker.until(lambda: len(worker.submits) == 2, "bob's submit")
    taken = await locked.http.post(
        SERVE,
        json=BODY | {"prompt": [7, 8]},
        headers=bearer("alice", **{"x-request-id": "same"}),
    )
    assert taken.status_code == 409  # control: within a tenant it is one id
    for _ in range(5):
        worker.gate.release()
    answers = [await first, await second]
    assert [one.headers["x-request-id"] for one in answers] == ["same", "same"]
    assert [one.json()["id"] for one in answers] == ["cmpl-same", "cmpl-same"]
    assert [one.json()["usage"]["completion_tokens"] for one in answers] == [3, 2]
    for name, num_tokens in (("alice", 3), ("bob", 2)):
        assert (await admin_record(locked, name, "same")).json()["num_tokens"] == num_tokens


def test_own_ids_lead_back_and_never_to_another_tenant():
    alice, b = Caller("alice", "", frozenset()), Caller("a", "", frozenset())
    for request_id in ("r", "a/b", "alice/r", "/"):
        assert alice.shown_id(alice.own_id(request_id)) == request_id
        assert NOBODY.shown_id(NOBODY.own_id(request_id)) == request_id
    assert b.own_id("lice/r") != alice.own_id("r")


# --- prefixes


async def test_equal_prompts_of_two_tenants_share_no_block(locked):
    for name in ("alice", "bob", "alice"):
        await ask(locked, name)
    await ask(locked, "bob", cache_salt="own")
    alice, bob, again, salted = locked.workers[0].submits
    assert alice.token_ids == bob.token_ids
    assert set(alice.hashes) & set(bob.hashes) == set()
    assert set(salted.hashes) & (set(alice.hashes) | set(bob.hashes)) == set()
    assert again.hashes == alice.hashes  # control: one tenant shares
    assert len(alice.hashes) == 3
    for submit, tenant in ((alice, "alice"), (bob, "bob")):
        # What the worker adds to the chain while it decodes goes on under the tenant's salt.
        hashes: list[bytes] = []
        HASHER.extend(hashes, PROMPT, submit.cache_salt)
        assert hashes == list(submit.hashes)
        assert submit.cache_salt == tenant_salt(tenant, "")


async def test_no_salt_of_a_client_leads_to_another_tenant(locked):
    await ask(locked, "alice")
    (alice,) = locked.workers[0].submits
    guesses = [
        "alice",
        "\x05\x00\x00\x00alice",
        alice.cache_salt.hex(),
        alice.cache_salt.decode("latin-1"),
    ]
    for salt in guesses:
        await ask(locked, "bob", cache_salt=salt)
    met = {h for submit in locked.workers[0].submits[1:] for h in submit.hashes}
    assert met.isdisjoint(alice.hashes)


async def test_match_tells_a_tenant_of_its_own_prefixes_alone(locked):
    worker = locked.workers[0]
    await ask(locked, "alice")
    await worker.publish(stored(worker.submits[0].hashes))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{locked.app.grpc_port}") as channel:
        stub: Any = RouterStub(channel)

        async def usable(name: str, **more) -> int:
            request = router_pb2.MatchRequest(model="tiny", token_ids=PROMPT, **more)
            metadata = (("authorization", f"Bearer {KEYS[name]}"),)
            return (await stub.Match(request, metadata=metadata)).workers[0].usable_tokens

        async with asyncio.timeout(60):
            while await usable("alice") != 8:  # noqa: ASYNC110  # control: it is in the index
                await asyncio.sleep(0.005)
        assert await usable("bob") == 0
        assert await usable("bob", cache_salt="alice") == 0
        assert await usable("alice", cache_salt="x") == 0


@pytest.mark.parametrize("method", ["Generate", "Match"])
async def test_grpc_looks_at_keys_before_it_reads_requests(locked, method):
    """A request has megabytes, and who has no key may send many."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{locked.app.grpc_port}") as channel:
        plain: Any = channel
        call = plain.stream_stream(f"/disagg.wire.v1.Router/{method}")(timeout=60)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED  # nothing was sent
        assert ("disagg-code", "invalid_api_key") in tuple(await call.trailing_metadata())
    metrics = (await locked.admin.get("/metrics", headers=bearer("grafana"))).text
    assert ('outcome="invalid_api_key"' in metrics) == (method == "Generate")


async def test_grpc_takes_no_larger_requests_than_http(open_house):
    house = await open_house(body_bytes_max=1 << 20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        stub: Any = RouterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Match(router_pb2.MatchRequest(prompt="a" * REGISTRATION_BYTES_MAX))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_grpc_asks_for_the_same_keys(locked):
    sampling = sampling_pb2.SamplingParams(max_tokens=3, top_p=1.0)
    request = router_pb2.GenerateRequest(
        request_id="g", model="tiny", token_ids=PROMPT, sampling=sampling
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{locked.app.grpc_port}") as channel:
        stub: Any = RouterStub(channel)

        async def generate(*metadata):
            return [answer async for answer in stub.Generate(request, metadata=metadata)]

        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("x-api-key", KEYS["revoked"]),), grpc.StatusCode.UNAUTHENTICATED),
            ((("x-api-key", KEYS["grafana"]),), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(*metadata)
            assert caught.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Match(router_pb2.MatchRequest(model="tiny"), metadata=metadata)
            assert caught.value.code() is code
        answers = await generate(("authorization", f"Bearer {KEYS['bob']}"))
    assert {answer.request_id for answer in answers} == {"g"}
    assert (await admin_record(locked, "bob", "g")).json()["outcome"] == "length"
    assert (await admin_record(locked, "alice", "g")).status_code == 404


# --- metrics


async def test_requests_and_tokens_are_counted_by_tenant(locked):
    await ask(locked, "alice")
    await ask(locked, "bob", max_tokens=2)
    await locked.http.post(SERVE, json=BODY | {"n": -1}, headers=bearer("bob"))
    lines = (await locked.admin.get("/metrics", headers=bearer("grafana"))).text.splitlines()
    for line in (
        'disagg_requests_total{model_name="tiny",outcome="length",tenant="alice"} 1.0',
        'disagg_requests_total{model_name="tiny",outcome="length",tenant="bob"} 1.0',
        'disagg_requests_total{model_name="tiny",outcome="invalid_value",tenant="bob"} 1.0',
        'disagg_prompt_tokens_total{model_name="tiny",tenant="alice"} 12.0',
        'disagg_generation_tokens_total{model_name="tiny",tenant="alice"} 3.0',
        'disagg_generation_tokens_total{model_name="tiny",tenant="bob"} 2.0',
    ):
        assert line in lines, line


def test_tenants_that_come_and_go_are_a_bounded_number_of_labels():
    metrics = Metrics("tiny")
    for number in range(TENANT_LABELS_MAX + 50):
        metrics.ended("x", f"t{number}")
        metrics.ended("x", "t0")
    lines = [line for line in metrics.text().splitlines() if "requests_total{" in line]
    assert len(lines) == TENANT_LABELS_MAX + 1
    assert 'disagg_requests_total{model_name="tiny",outcome="x",tenant="(others)"} 50.0' in lines
    labels = 'model_name="tiny",outcome="x",tenant="t0"'
    assert f"disagg_requests_total{{{labels}}} {TENANT_LABELS_MAX + 51}.0" in lines


# --- the cluster's secret


async def test_a_worker_with_another_secret_is_refused_and_told_why(open_house, caplog):
    house = await open_house()
    secret = "another secret of another cluster"
    hasher = BlockHasher(block_hash_key(secret, "fingerprint"), BLOCK_TOKENS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.add(contract=replace(CONTRACT, hash_scheme=hasher.scheme))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    told = (caught.value.details() or "") + caplog.text
    assert "w1 names KV blocks by another secret than this router" in told
    assert "cluster.hash_key" in told
    for known in (secret, ROUTER["hash_key"], block_hash_key(secret, "fingerprint").hex()):
        assert known not in told
    assert house.app.dispatcher.core.fleet == ()
    await house.add("w2")  # control: the same secret
