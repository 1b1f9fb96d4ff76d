"""`disagg serve` as a user runs it: Ray, router, workers, a killed actor, Ctrl-C, nothing left."""

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI

from disagg.cluster.processes import is_alive, named
from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.program import BOUND_S, Program, wait_until_gone

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Program]:
    make_checkpoint(tmp_path / "tiny", "gemma3")
    ports = ["--http-port", "0", "--grpc-port", "0", "--set", "router.admin_port=0"]
    small = ["--set", "worker.device=cpu", "--set", "scheduling.max_sequences=8"]
    small += ["--set", "transfer.reserve_timeout_ms=30000"]  # a slow machine is no refusal
    small += ["--set", "router.drain_timeout_ms=1"]  # streams end at once
    command = ("serve", "--model", "tiny", *ports, *small)
    # A group of its own, as a shell gives it; of another cluster the variable may say.
    environment = {**os.environ, "RAY_ADDRESS": "192.0.2.1:6379"}
    started = Program(
        "disagg.commands", *command, cwd=tmp_path, before=["setsid"], environment=environment
    )
    yield started
    started.end()


def arguments_of(pid: int) -> list[str]:
    """None where it has ended: Ray starts processes that live shortly."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def group_of(pid: int) -> int | None:
    """None where it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def router_pid(served: Program) -> int:
    (pid,) = [p.pid for p in served.tree() if "router" in arguments_of(p.pid)]
    return pid


def router_arguments(served: Program) -> list[str]:
    return arguments_of(router_pid(served))


def get(url: str, path: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


PROMPT = [1, *(20 + i * 37 % 200 for i in range(100))]
NUM_TOKENS = 8
NUM_TOKENS_LONG = 3_000
"""More than are sampled before a signal."""
SERVES = r"worker prefill-0 serves{} on \S+ \(pid (\d+), epoch (\w+)\)"


ADMIN = r"^metrics and records are on (http://[\d.]+:\d+)$"


def ask(url: str, admin_url: str, request_id: str) -> tuple[list[float], dict[str, Any]]:
    """One greedy completion: its logprobs, and the router's record of it."""
    client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=BOUND_S)
    with client:
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=NUM_TOKENS,
            temperature=0,
            logprobs=0,
            extra_headers={"X-Request-Id": request_id},
        )
    assert answer.choices[0].logprobs is not None
    logprobs = answer.choices[0].logprobs.token_logprobs
    assert logprobs is not None
    _, record = get(admin_url, f"/v1/disagg/requests/{request_id}")
    assert isinstance(record, dict)
    return [x for x in logprobs if x is not None], record


def test_a_cluster_from_its_start_to_ctrl_c(served: Program, tmp_path: Path) -> None:
    """The one Ray cluster of a test run: hand-over, a killed actor, a new epoch, a clean end."""
    first_life = served.wait_for(SERVES.format(""))
    served.wait_for(
        r"^worker prefill-0 takes native \(.*\): cpu, float32, .* \(auto: 8 sequences of "
    )
    admin_url = served.wait_for(ADMIN)[1]
    url = served.wait_for(r"^serving tiny on (http://[\d.]+:\d+)/v1 \(Ctrl-C stops\)$")[1]
    # Ray's own default is 15 more: behind everything else on the machine.
    niceness = os.getpriority(os.PRIO_PROCESS, served.process.pid)
    assert os.getpriority(os.PRIO_PROCESS, int(first_life[1])) == niceness
    others = served.tree() - {served.identity}
    assert [one for one in others if group_of(one.pid) == served.process.pid] == []
    _, expected, min_gap = reference_generate(tmp_path / "tiny", PROMPT, NUM_TOKENS)
    assert min_gap > 1e-3

    logprobs, record = ask(url, admin_url, "before")
    assert logprobs == pytest.approx(expected, abs=1e-4)
    (only,) = record["generations"]
    assert only["transfer"]["owner"] == {"worker_id": "prefill-0", "epoch": first_life[2]}

    os.kill(int(first_life[1]), signal.SIGKILL)
    second_life = served.wait_for(SERVES.format(" again"))
    assert second_life[2] != first_life[2]
    wait_until_ready(admin_url, "prefill-0", second_life[2])
    logprobs, record = ask(url, admin_url, "after")
    assert logprobs == pytest.approx(expected, abs=1e-4)
    (only,) = record["generations"]
    assert only["transfer"]["owner"] == {"worker_id": "prefill-0", "epoch": second_life[2]}
    assert sum(group["pulled_bytes"] for group in only["transfer"]["groups"]) > 0

    end_while_it_streams(served, url, signal.SIGINT)
    assert os.listdir(tmp_path) == ["tiny"]


@pytest.mark.slow
def test_a_cluster_that_is_terminated(served: Program) -> None:
    url = served.wait_for(r"^serving tiny on (http://[\d.]+:\d+)/v1")[1]
    end_while_it_streams(served, url, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_its_process_group(served: Program, number: signal.Signals) -> None:
    """As `timeout` and the end of a terminal send it: Ray is there until the workers have ended."""
    served.wait_for("^serving tiny on ")
    tree = served.tree()
    os.killpg(served.process.pid, number)
    assert served.process.wait(BOUND_S) == 0
    wait_until_gone(tree)


@pytest.mark.slow
def test_a_signal_to_every_process(served: Program) -> None:
    """As of `pkill -f`: what Ray can no longer be asked is not waited for, nothing is left."""
    served.wait_for("^serving tiny on ")
    tree = served.tree()
    for one in tree:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGTERM)
    assert served.process.wait(50) == 1  # Ray's library itself gives up after 60 s
    wait_until_gone(tree)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("while_ray_starts", [True, False])
def test_a_signal_while_it_starts(
    served: Program, number: signal.Signals, while_ray_starts: bool
) -> None:
    if while_ray_starts:  # Ray's own handler of SIGTERM once ended it with code 15
        served.wait_for("^starting Ray ")
        wait_until_it_runs(served, "gcs_server")
    else:
        served.wait_for("^starting workers ")
    tree = served.tree()
    folder = Path(router_arguments(served)[-2]).parent
    served.process.send_signal(number)
    served.wait_for("^interrupted, stopping$")
    assert served.process.wait(9.5) == 0  # half of cluster.stop_timeout_s is 10
    wait_until_gone(tree)
    assert not folder.exists()


def wait_until_it_runs(served: Program, name: str) -> None:
    """Until a process of that program has been started."""
    deadline = time.monotonic() + BOUND_S
    while not any(name in argument for p in served.tree() for argument in arguments_of(p.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


NOISE = re.compile(r"destroyed|never retrieved|Traceback|Exception|ERROR|shutdown")


def end_while_it_streams(served: Program, url: str, number: signal.Signals) -> None:
    """Streams end in an error that says so; the logs say nothing strange; nothing is left."""
    tree = served.tree()
    folder = Path(router_arguments(served)[-2]).parent
    found = [folder / "router.log", *folder.glob("ray/session_latest/logs/worker-*.err")]
    with ExitStack() as opened:
        logs = [opened.enter_context(path.open(errors="replace")) for path in found]
        client = opened.enter_context(
            OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=BOUND_S)
        )
        streams = [
            client.completions.create(
                model="tiny",
                prompt=[*PROMPT, 20 + n],
                max_tokens=NUM_TOKENS_LONG,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for n in range(3)
        ]
        for answer in streams:
            next(answer)
        served.process.send_signal(number)
        for answer in streams:
            with pytest.raises(APIError, match="the router is stopping"):
                list(answer)
        served.wait_for("^stopping$")
        assert served.process.wait(BOUND_S) == 0
        wait_until_gone(tree)
        said = [log.read() for log in logs]
    assert [text for text in said if NOISE.search(text)] == []
    # Control: these are the logs, to their ends.
    assert "router stopped" in said[0]
    lost = re.compile(r"lost \S+ of epoch")  # whichever of its two streams ended first
    assert sum(bool(lost.search(text)) for text in said[1:]) == 2, said
    assert not folder.exists()


def wait_until_ready(url: str, worker_id: str, epoch: str) -> None:
    """Until the router has the worker in that life, ready."""
    deadline = time.monotonic() + BOUND_S
    while True:
        _, body = get(url, "/v1/disagg/workers")
        assert isinstance(body, dict)
        wanted = {"worker_id": worker_id, "epoch": epoch}
        if any(w["info"]["incarnation"] == wanted and w["ready"] for w in body["workers"]):
            return
        assert time.monotonic() < deadline, body
        time.sleep(0.05)


@pytest.mark.slow
def test_the_end_of_the_router_is_told_and_ends_everything(served: Program) -> None:
    served.wait_for("^serving tiny on ")
    tree = served.tree()
    os.kill(router_pid(served), signal.SIGKILL)
    served.wait_for(
        r"^disagg: router was killed \(signal 9\): most often by the kernel for lack of memory"
    )
    assert served.process.wait(BOUND_S) == 2
    wait_until_gone(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "moment"),
    [
        ("gcs_server", "^serving tiny on "),
        ("raylet", "^serving tiny on "),
        ("raylet", "^starting workers "),
        ("gcs_server", "^starting Ray "),
    ],
)
def test_the_end_of_a_part_of_ray_is_told_and_ends_everything(
    served: Program, part: str, moment: str
) -> None:
    """Ray's library would end it a minute later, and clean up nothing.

    With 1 where a call of that library was under way, which waits for that part.
    """
    served.wait_for(moment)
    if "workers" in moment:
        wait_until_it_runs(served, "ray::WorkerActor")  # it has not answered yet
    if "Ray" in moment:
        wait_until_it_runs(served, "gcs_server")
    tree = served.tree()
    keys = Path(router_arguments(served)[-2]).parent / "certificates/node/tls.key"
    assert keys.exists()
    (process,) = named(tree, [part])
    os.kill(process.pid, signal.SIGKILL)
    ended = f"Ray's {part} has ended"
    told = f"^(disagg: )({ended}|Ray did not start)|^{ended}, and its library waits for it"
    said = served.wait_for(told)
    if said[2] == ended:
        assert "it was killed (signal 9)" in said.string
    assert served.process.wait(BOUND_S) == (2 if said[1] else 1)
    assert [one for one in tree if is_alive(one)] == []  # also what lost its parent
    assert not keys.exists()
