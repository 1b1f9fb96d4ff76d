"""Two routers over the same workers: neither touches the other's requests."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, START_S, WAIT_S, wait_until
from tests.process.replicas import Replicas, Router, SpreadingClient, collect, running, stream
from tests.process.served_model import WINDOW

pytestmark = pytest.mark.timeout(900)

LONG = 300
"""Tokens of a stream that is still running when something happens to it: a second, at least."""
KNOWN = 2
"""The stream whose whole text is known."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("routers")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    options = {"worker_silent_ms": 60_000, "drain_timeout_ms": 120_000}
    started = Replicas(model_dir, folder, options, {"drain_timeout_ms": 120_000})
    with running(started, "a", "b", p0="prefill", d0="decode", s0="both") as replicas:
        yield replicas


def body(salt: int, num_tokens: int = LONG) -> dict[str, Any]:
    """A greedy completion, whose text is the same wherever it is computed."""
    prompt = [7 + (salt * 13 + i * i) % 90 for i in range(40 + salt % 7)]
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def whole(router: Router, salt: int, num_tokens: int = LONG) -> str:
    """The text that every answer must have."""
    answer = collect(stream(router.http, body(salt, num_tokens)))
    assert answer.done, answer
    return answer.text


@pytest.fixture(scope="module")
def expected(two: Replicas) -> str:
    """The text of the stream that is known."""
    return whole(two.routers["b"], KNOWN)


def restored(two: Replicas) -> tuple[Router, Router]:
    """Both routers and all workers, started anew where they have ended."""
    for name, router in list(two.routers.items()):
        if router.process.popen.poll() is not None:
            two.start_router(name)
    for name, process in list(two.workers.items()):
        if process.popen.poll() is not None:
            two.start_worker(name)
    two.wait_ready()
    return two.routers["a"], two.routers["b"]


def begun(router: Router, salt: int, request_id: str = "", num_tokens: int = LONG) -> Iterator[str]:
    """A stream whose first tokens have come."""
    events = stream(router.http, body(salt, num_tokens), request_id)
    first = next(events)

    def all_of_it() -> Iterator[str]:
        yield first
        yield from events

    return all_of_it()


def test_requests_of_one_id_at_two_routers_are_two_and_one_router_dies(
    two: Replicas, expected: str
) -> None:
    a, b = restored(two)
    lost, kept = begun(a, 1, "same"), begun(b, KNOWN, "same")

    def load() -> int:
        return sum(view["stats"]["num_running"] for view in b.workers().values())

    wait_until(lambda: load() == 2, "b to see both")
    a.process.kill()
    with pytest.raises(httpx.HTTPError):
        collect(lost)
    answer = collect(kept)
    assert (answer.text, answer.error, answer.done) == (expected, None, True)

    wait_until(lambda: not load(), "what a asked for to end at the workers")
    record = b.record("same")
    assert len(record["generations"]) == 1, "b planned nothing anew"


def test_a_router_learns_of_load_that_it_did_not_cause(two: Replicas) -> None:
    a, b = restored(two)
    events = begun(a, 3)
    running_at = wait_until(
        lambda: [n for n, view in b.workers().items() if view["stats"]["num_running"]],
        "b to see a's request",
    )
    assert all(b.workers()[name]["num_live"] == 0 for name in running_at)
    assert collect(events).done


def test_what_is_sent_again_at_another_replica_is_served_once(two: Replicas, expected: str) -> None:
    a, b = restored(two)
    first = begun(a, KNOWN, "again")
    second = begun(b, KNOWN, "again")
    superseded = collect(first)
    assert superseded.error is not None
    assert superseded.error["code"] == "superseded"
    assert not superseded.done
    answer = collect(second)
    assert (answer.text, answer.done) == (expected, True)
    assert a.record("again")["outcome"] == "failed"


def test_the_same_at_one_router(two: Replicas) -> None:
    a, _ = restored(two)
    first, second = begun(a, 4, "once-more"), begun(a, 4, "once-more")
    superseded, answer = collect(first), collect(second)
    assert superseded.error is not None
    assert superseded.error["code"] == "superseded"
    assert answer.done


def test_another_request_of_the_same_id_supersedes_nothing(two: Replicas) -> None:
    a, b = restored(two)
    first, second = begun(a, 5, "traced"), begun(b, 6, "traced")
    assert collect(first).done
    assert collect(second).done


def test_a_reset_by_one_router_reaches_the_other(two: Replicas) -> None:
    a, b = restored(two)
    request = body(8, 1) | {"prompt": [9, *range(10, 90)]}

    def cached_at_b() -> int:
        answer = b.http.post("/v1/completions", json=request).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached_at_b()
    wait_until(cached_at_b, "the prefix to be found through b")
    assert a.admin.post("/reset_prefix_cache").json()["success"]
    assert cached_at_b() == 0


def test_sigterm_at_a_router_lets_streams_end_and_refuses_new_ones(
    two: Replicas, expected: str
) -> None:
    a, _ = restored(two)
    events = begun(a, KNOWN)
    a.process.popen.send_signal(signal.SIGTERM)
    refused = wait_until(
        lambda: [r for r in (a.http.get("/ready"),) if r.status_code == 503], "a not to be ready"
    )
    assert refused[0].json()["status"] == "stopping"
    answer = httpx.post(a.url + "/v1/completions", json=body(1, 1))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "router_stopping"
    assert answer.headers["retry-after"]
    assert answer.headers["connection"] == "close"
    ended = collect(events)
    assert (ended.text, ended.error, ended.done) == (expected, None, True)
    assert a.process.popen.wait(WAIT_S) == 0


def test_beyond_the_setting_a_stream_ends_with_an_error(two: Replicas) -> None:
    """The control of the test above: it is the setting that lets streams end."""
    a, _ = restored(two)
    a.process.popen.send_signal(signal.SIGTERM)
    assert a.process.popen.wait(WAIT_S) == 0
    two.start_router("a", drain_timeout_ms=1)
    a, _ = restored(two)
    events = begun(a, 10)
    a.process.popen.send_signal(signal.SIGTERM)
    ended = collect(events)
    assert ended.error is not None
    assert ended.error["code"] == "router_stopping"
    assert not ended.done
    assert a.process.popen.wait(WAIT_S) == 0
    two.start_router("a", drain_timeout_ms=120_000)


def test_a_second_signal_ends_a_router_at_once(two: Replicas) -> None:
    a, _ = restored(two)
    events = begun(a, 11)
    a.process.popen.send_signal(signal.SIGTERM)
    wait_until(lambda: a.http.get("/ready").status_code == 503, "a to drain")
    a.process.popen.send_signal(signal.SIGTERM)
    assert a.process.popen.wait(WAIT_S) == 130
    with pytest.raises(httpx.HTTPError):
        collect(events)


def test_sigterm_at_a_worker_lets_its_part_end(two: Replicas, expected: str) -> None:
    a, b = restored(two)
    events = begun(a, KNOWN)
    (name,) = wait_until(
        lambda: [n for n, view in b.workers().items() if view["stats"]["num_running"]],
        "a's stream to be decoded somewhere",
    )
    two.workers[name].popen.send_signal(signal.SIGTERM)
    for router in (a, b):

        def draining(router: Router = router) -> bool:
            return bool(router.workers()[name]["stats"]["draining"])

        wait_until(draining, f"{router.name} to hear of it")
        assert not router.workers()[name]["ready"]
    record_id = "while-it-drains"
    assert collect(stream(b.http, body(13, 2), record_id)).done
    parts = [(one["prefill"], one["decode"]) for one in b.record(record_id)["generations"]]
    used = {part["worker_id"] for both in parts for part in both}
    assert used, "control: it was planned"
    assert name not in used, "no new work is planned on it"
    ended = collect(events)
    assert (ended.text, ended.error, ended.done) == (expected, None, True)
    assert two.workers[name].popen.wait(WAIT_S) == 0


def test_a_rolling_restart_of_everything_fails_no_request(two: Replicas) -> None:
    a, b = restored(two)
    expected = {salt: whole(b, salt, 24) for salt in range(20, 26)}
    stop, failures, served = threading.Event(), list[str](), list[int]()

    def ask(number: int) -> None:
        client = SpreadingClient([a.url, b.url], f"client {number}")
        try:
            while not stop.is_set():
                salt = 20 + len(served) % 6
                answer = client.complete(body(salt, 24), f"roll-{number}-{len(served)}")
                if not answer.done or answer.text != expected[salt]:
                    failures.append(f"{answer}, expected {expected[salt]}")
                served.append(answer.num_tries)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        finally:
            client.close()

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for client in clients:
        client.start()
    try:
        for name in ("a", "b"):
            router = two.routers[name]
            wait_until(router.num_live, f"requests at {name}")
            router.process.popen.send_signal(signal.SIGTERM)
            assert router.process.popen.wait(START_S) == 0
            two.start_router(name)
            two.wait_ready(name)
        for name in list(two.workers):
            num_served = len(served)
            two.workers[name].popen.send_signal(signal.SIGTERM)
            assert two.workers[name].popen.wait(START_S) == 0
            two.start_worker(name)
            two.wait_ready()

            def goes_on(before: int = num_served) -> bool:
                return bool(failures) or len(served) > before

            wait_until(goes_on, f"answers after {name} is back")
            assert not failures, failures[:3]
    finally:
        stop.set()
        for client in clients:
            client.join(WAIT_S * 4)
    assert not failures, failures[:3]
    assert len(served) > 6
