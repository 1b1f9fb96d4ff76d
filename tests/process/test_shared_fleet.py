"""Routers with tenants over one fleet: what is sent twice, bounds in total, ends of both."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from disagg.router.keys import new_key
from disagg.tls.connections import client_channel
from disagg.wire.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, wait_until
from tests.process.replicas import Answer, Replicas, Router, collect, running, stream
from tests.process.served_model import WINDOW
from tests.process.test_routers import begun, body, restored, whole
from tests.process.test_tenants import write_keys

pytestmark = pytest.mark.timeout(900)

LONG = 300
SEQUENCES = 4
"""Most requests at a worker, of all routers."""


class Shared(Replicas):
    """Routers that know the tenants ``alice`` and ``bob``; this test is ``ops``."""

    keys: dict[str, str]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    keys = {name: new_key() for name in ("alice", "bob", "ops")}
    write_keys(folder / "keys.json", keys)
    routers = {
        "worker_silent_ms": 60_000,
        "drain_timeout_ms": 120_000,
        "api_keys_file": str(folder / "keys.json"),
        "allow_unauthenticated": False,
        "worker_waiting_max": 0,
    }
    workers = {"drain_timeout_ms": 120_000, "max_sequences": SEQUENCES}
    replicas = Shared(model_dir, folder, routers, workers)
    replicas.keys = keys
    replicas.client_headers["Authorization"] = f"Bearer {keys['ops']}"
    replicas.modules["d0"] = "tests.process.worker_main"  # it can be held at a READ
    with running(replicas, "a", "b", p0="prefill", d0="decode", s0="both"):
        yield replicas


def as_tenant(shared: Shared, router: Router, tenant: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {shared.keys[tenant]}"}
    return httpx.Client(base_url=router.url, timeout=120, headers=headers)


def load(router: Router) -> dict[str, dict[str, int]]:
    """Requests that workers have for each router, by worker and by the routers' names."""
    return {
        name: {one["router"].split(":")[0]: one["num_requests"] for one in view["stats"]["loads"]}
        for name, view in router.workers().items()
    }


def decoded_by(router: Router, request_id: str) -> str:
    """Known at once: by its stats a worker is told to have what may have ended meanwhile."""
    name: str = router.record(request_id)["generations"][-1]["decode"]["worker_id"]
    return name


def idle(router: Router) -> bool:
    return not any(load(router).values())


# -- sent twice ---------------------------------------------------------------------------------


def test_two_tenants_may_use_one_id_for_one_prompt_at_two_replicas(shared: Shared) -> None:
    a, b = restored(shared)
    expected = whole(a, 1, LONG)
    with as_tenant(shared, a, "alice") as alice, as_tenant(shared, b, "bob") as bob:
        first = stream(alice, body(1, LONG), "one-id")
        token = next(first)
        second = collect(stream(bob, body(1, LONG), "one-id"))
        rest = collect(first)
    assert (second.text, second.done) == (expected, True)
    assert (rest.error, rest.done) == (None, True), token
    with as_tenant(shared, a, "alice") as alice, as_tenant(shared, b, "alice") as again:
        first = stream(alice, body(1, LONG), "one-id")
        next(first)
        second = collect(stream(again, body(1, LONG), "one-id"))
        rest = collect(first)
    assert rest.error is not None, "the control: of one tenant it is one request"
    assert rest.error["code"] == "superseded"
    assert (second.text, second.done) == (expected, True)


def test_what_is_sent_again_when_the_first_is_over_is_served(shared: Shared) -> None:
    a, b = restored(shared)
    expected = whole(a, 2, 24)
    for router in (a, b, a, a, b):
        answer = collect(stream(router.http, body(2, 24), "over"))
        assert (answer.text, answer.error, answer.done) == (expected, None, True)
    assert {router.record("over")["outcome"] for router in (a, b)} == {"length"}


def test_what_is_sent_to_two_replicas_at_one_moment_is_served_once(shared: Shared) -> None:
    a, b = restored(shared)
    expected = whole(a, 3, LONG)
    for number in range(6):
        start = threading.Barrier(2)

        def send(router: Router, number: int = number, start: Any = start) -> Answer:
            start.wait(WAIT_S)
            try:
                return collect(stream(router.http, body(3, LONG), f"twice-{number}"))
            except httpx.HTTPStatusError as error:
                return Answer(error=error.response.json()["error"])

        with ThreadPoolExecutor(2) as both:
            answers = list(both.map(send, (a, b)))
        (served,) = [answer for answer in answers if answer.done]
        (other,) = [answer for answer in answers if not answer.done]
        assert served.text == expected
        assert other.error is not None
        assert other.error["code"] == "superseded"
    wait_until(lambda: idle(a), "nothing to be left of them")


# -- bounds -------------------------------------------------------------------------------------


def test_two_routers_share_a_worker_and_neither_keeps_the_other_out(shared: Shared) -> None:
    """How the bound is parted between them is in tests/unit/routing/test_shared_workers.py."""
    a, b = restored(shared)

    def ask(number: int) -> bool:
        router = (a, b)[number % 2]
        return collect(stream(router.http, body(10 + number, 150))).done

    with ThreadPoolExecutor(40) as clients:
        asked = [clients.submit(ask, number) for number in range(40)]
        seen = []
        while not all(one.done() for one in asked):
            if all(int(r.admin.get("/health").json()["num_waiting"]) for r in (a, b)):
                seen.append(load(a))
            time.sleep(0.05)
    assert all(one.result() for one in asked)
    assert len(seen) > 5, "both had more than there was room for"
    both = [one for one in seen if any(len(loads) == 2 for loads in one.values())]
    assert both, "they shared a worker"
    most = [max((sum(loads.values()) for loads in one.values()), default=0) for one in seen]
    # Requests that begin or end at one moment at both do so before either has heard of the other.
    assert max(most) <= 2 * SEQUENCES


# -- ends ---------------------------------------------------------------------------------------


def test_whatever_still_runs_after_the_drain_is_told_so_in_its_own_form(shared: Shared) -> None:
    a, _ = restored(shared)
    a.process.popen.send_signal(signal.SIGTERM)
    assert a.process.popen.wait(WAIT_S) == 0
    shared.start_router("a", drain_timeout_ms=1)
    a, b = restored(shared)
    events = begun(a, 5)
    with client_channel(f"127.0.0.1:{a.options['grpc_port']}", shared.tls_directory) as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(
            router_pb2.GenerateRequest(
                model=MODEL,
                token_ids=body(4)["prompt"],
                sampling=sampling_pb2.SamplingParams(max_tokens=1_500),
                ignore_eos=True,
            ),
            metadata=(("authorization", shared.client_headers["Authorization"]),),
        )
        next(iter(call))
        with ThreadPoolExecutor(1) as one:
            whole_answer = one.submit(a.http.post, "/v1/completions", json=body(6, 1_500))
            wait_until(lambda: a.num_live() == 3, "all three to run")
            a.process.popen.send_signal(signal.SIGTERM)
            answer = whole_answer.result(WAIT_S)
        with pytest.raises(grpc.RpcError) as error:
            list(call)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "router_stopping"
    assert answer.headers["retry-after"]
    ended = collect(events)
    assert ended.error is not None
    assert ended.error["code"] == "router_stopping"
    assert not ended.done
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert a.process.popen.wait(WAIT_S) == 0
    wait_until(lambda: idle(b), "the workers to have nothing of it")
    shared.start_router("a", drain_timeout_ms=120_000)


def test_a_worker_whose_time_is_over_hands_its_streams_on(shared: Shared) -> None:
    a, b = restored(shared)
    expected = whole(b, 7, LONG)
    shared.workers["s0"].popen.send_signal(signal.SIGTERM)
    assert shared.workers["s0"].popen.wait(WAIT_S) == 0
    shared.start_worker("s0", drain_timeout_ms=1)
    shared.wait_ready()
    events: list[Iterator[str]] = []
    while not events or decoded_by(a, f"moved-{len(events) - 1}") != "s0":
        events.append(begun(a, 7, f"moved-{len(events)}", LONG))
        assert len(events) < 8, "one of them to be served by it"
    shared.workers["s0"].popen.send_signal(signal.SIGTERM)
    for number, one in enumerate(events):
        answer = collect(one)
        assert (answer.text, answer.error, answer.done) == (expected, None, True), number
    assert shared.workers["s0"].popen.wait(WAIT_S) == 0
    records = [a.record(f"moved-{number}") for number in range(len(events))]
    moved = [record for record in records if len(record["generations"]) > 1]
    assert moved, "it did not wait for them"
    assert all("draining" in record["generations"][0]["cause"] for record in moved)


def test_a_worker_that_drains_keeps_what_it_lends_until_it_is_read(shared: Shared) -> None:
    a, b = restored(shared)
    expected = whole(b, 8, 24)
    reader, owner = shared.workers["d0"], shared.workers["p0"]
    shared.workers["s0"].popen.send_signal(signal.SIGTERM)
    assert shared.workers["s0"].popen.wait(WAIT_S) == 0
    for command in ("forget", "hold reads"):
        reader.command(command)
    events = stream(a.http, body(9, 24), "lent")
    with ThreadPoolExecutor(1) as one:
        answer = one.submit(collect, events)
        reader.wait_line("held reads", WAIT_S)
        owner.popen.send_signal(signal.SIGTERM)

        def draining() -> bool:
            stats = b.workers()["p0"]["stats"]
            return bool(stats["draining"] and stats["num_leases"])

        wait_until(draining, "p0 to drain with its lease")
        time.sleep(1)  # twice as long as an idle worker stays: a control
        assert owner.popen.poll() is None, "somebody is going to read what it lends"
        reader.command("pass reads")
        got = answer.result(WAIT_S)
    assert (got.error, got.done) == (None, True)
    (generation,) = a.record("lent")["generations"]
    assert generation["prefill"]["worker_id"] == "p0"
    assert generation["transfer"] is not None
    assert owner.popen.wait(WAIT_S) == 0
    restored(shared)
    assert whole(b, 9, 24) == got.text
    assert whole(b, 8, 24) == expected
