"""A worker that drains: what still runs there moves with its KV, and nothing is computed again."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from disagg.commands.main import app
from disagg.errors import RequestError
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, wait_until
from tests.process.replicas import Answer, Replicas, Router, collect, running, stream
from tests.process.served_model import BLOCK_TOKENS, WINDOW

pytestmark = pytest.mark.timeout(900)

LONG = 800
"""Tokens of a stream that still runs when the time to drain is over."""
DEADLINE_MS = 2_000
PROMPT_TOKENS = 70
ANY_END = {"ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "gemma3", "gemma3", window=WINDOW)


@pytest.fixture(scope="module")
def started(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    options = {"worker_silent_ms": 60_000}
    fleet = Replicas(model_dir, tmp_path_factory.mktemp("drain"), options)
    with running(fleet, "a", s0="both", s1="both") as replicas:
        yield replicas


@pytest.fixture
def fleet(started: Replicas) -> Replicas:
    """Both workers in some life, with nothing cached."""
    for name, process in list(started.workers.items()):
        if process.popen.poll() is not None:
            started.start_worker(name)
    started.wait_ready()
    answer = router_of(started).admin.post("/reset_prefix_cache")
    assert answer.status_code == 200, answer.text
    return started


def router_of(fleet: Replicas) -> Router:
    return fleet.routers["a"]


def body(salt: int) -> dict[str, Any]:
    prompt = [7 + (salt * 31 + i * i) % 90 for i in range(PROMPT_TOKENS)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": LONG, "temperature": 0.0} | ANY_END


def whole(fleet: Replicas, salt: int) -> str:
    """What nobody disturbs; then nothing of it is cached any more."""
    answer = collect(stream(router_of(fleet).http, body(salt)))
    assert answer.done, answer
    assert router_of(fleet).admin.post("/reset_prefix_cache").status_code == 200
    return answer.text


def begun(fleet: Replicas, salt: int, request_id: str) -> tuple[Iterator[str], str]:
    """A stream whose first tokens are out, and the worker that decodes it."""
    events = stream(router_of(fleet).http, body(salt), request_id)
    first = [next(events) for _ in range(5)]
    (generation,) = router_of(fleet).record(request_id)["generations"]

    def all_of_it() -> Iterator[str]:
        yield from first
        yield from events

    return all_of_it(), generation["decode"]["worker_id"]


def drain(fleet: Replicas, name: str, *more: str) -> Result:
    url = str(router_of(fleet).admin.base_url)
    return CliRunner().invoke(app, ["drain", name, "--url", url, *more])


def assert_moved(fleet: Replicas, request_id: str, answer: Answer, expected: str) -> None:
    """It went on at the other worker, to which all its KV moved: none was computed again."""
    assert (answer.text, answer.error, answer.done) == (expected, None, True)
    first, second = router_of(fleet).record(request_id)["generations"]
    assert first["cause"].startswith("draining")
    assert second["decode"] != first["decode"] == second["prefill"]
    assert second["computed_tokens"] is None, "there was no prefill"
    num_blocks = -(-(second["num_prompt_tokens"] - 1) // BLOCK_TOKENS)
    *windows, full = second["transfer"]["groups"]
    # Who prefilled may have been the other one: then it has the prompt's full blocks.
    num_hits = len(full["block_map"]) - len(full["block_map"].lstrip("h"))
    assert num_hits <= PROMPT_TOKENS // BLOCK_TOKENS
    assert full["block_map"] == "h" * num_hits + "p" * (num_blocks - num_hits)
    assert all(set(group["block_map"]) == {".", "p"} for group in windows)
    assert second["num_tokens"] == LONG - first["num_tokens"] > 0


def test_what_runs_moves_with_its_kv(fleet: Replicas) -> None:
    expected = whole(fleet, 1)
    events, name = begun(fleet, 1, "moves")
    ended = drain(fleet, name, "--wait", "--deadline", str(DEADLINE_MS))
    assert ended.exit_code == 0, ended.output
    assert f"{name}: 1 running" in ended.output
    assert f"{name}: done" in ended.output
    assert_moved(fleet, "moves", collect(events), expected)
    assert fleet.workers[name].popen.wait(WAIT_S) == 0


def test_sigterm_moves_it_as_well(model_dir: Path, tmp_path: Path) -> None:
    """And to a worker for prefills, where no other is left."""
    own = {"drain_timeout_ms": DEADLINE_MS}
    two = Replicas(model_dir, tmp_path, {"worker_silent_ms": 60_000}, own)
    with running(two, "a", d0="decode", p0="prefill"):
        expected = whole(two, 2)
        events, name = begun(two, 2, "moves")
        assert name == "d0"
        two.workers[name].popen.send_signal(signal.SIGTERM)
        assert_moved(two, "moves", collect(events), expected)
        assert two.workers[name].popen.wait(WAIT_S) == 0


def test_of_a_killed_worker_all_is_computed_again(fleet: Replicas) -> None:
    """Control: all that the other worker had not computed itself, and that is at most the prompt's
    full blocks."""
    expected = whole(fleet, 3)
    events, name = begun(fleet, 3, "killed")
    fleet.workers[name].kill()
    answer = collect(events)
    assert (answer.text, answer.error, answer.done) == (expected, None, True)
    first, second = router_of(fleet).record("killed")["generations"]
    assert second["computed_tokens"] == second["num_prompt_tokens"] - second["hit_tokens"]
    assert second["hit_tokens"] <= PROMPT_TOKENS
    assert second["num_prompt_tokens"] == PROMPT_TOKENS + first["num_tokens"] > PROMPT_TOKENS


def test_a_host_drains_and_takes_work_again(fleet: Replicas) -> None:
    ended = drain(fleet, "127.0.0.1", "--wait", "--deadline", str(DEADLINE_MS))
    assert ended.exit_code == 0, ended.output
    router = router_of(fleet)
    assert all(view["stats"]["draining"] for view in router.workers().values())
    assert router.http.get("/ready").status_code == 503
    assert all(process.popen.poll() is None for process in fleet.workers.values())
    assert drain(fleet, "127.0.0.1", "--undo").exit_code == 0
    wait_until(lambda: router.http.get("/ready").status_code == 200, "work to be taken again")
    short = body(4) | {"max_tokens": 3}
    assert collect(stream(router.http, short)).done


def test_an_unknown_name_says_what_there_is(fleet: Replicas) -> None:
    ended = drain(fleet, "elsewhere")
    assert isinstance(ended.exception, RequestError)
    assert "workers: s0, s1; hosts: 127.0.0.1" in ended.exception.message
