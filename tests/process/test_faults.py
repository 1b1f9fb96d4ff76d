"""Whatever dies or is taken away: exact tokens or an OpenAI error, and nothing stays held."""

import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from openai.types import Completion

from tests.process.harness import wait_until
from tests.process.raw_client import RawClient
from tests.process.served_model import Expected, ServedModel, assert_exact, handed_over, is_exact

pytestmark = pytest.mark.timeout(600)

ANSWER_S = 60
NUM_PULLED = 5 * 3 + 10
"""Blocks of a prompt of 150 tokens: three of each window, all of full attention."""
REPLANS = 'disagg_routing_replans_total{{cause="{}",model_name="tiny"}}'


PHASES: dict[str, tuple[str, str, int]] = {
    "prefill": ("p0", "steps", 0),
    "pull while it is prefilled": ("d0", "reads", 1),
    "pull": ("d0", "reads", 0),
    "commit": ("d0", "dones", 0),
    "decode": ("d0", "steps", 0),
}
"""Where a request is stopped: worker, gate, prefill steps (of two) or 0 for all."""


class Stop:
    """From `hold` on, requests stop in one phase; `wait` until one has."""

    def __init__(self, served: ServedModel, phase: str) -> None:
        self.cluster = served.cluster
        self.name, self.gate, self.num_steps = PHASES[phase]
        self.told = self.cluster.tell(self.name, f"hold {self.gate}")
        if self.num_steps:
            self.told_prefill = self.cluster.tell("p0", "hold steps")
            self.cluster.tell("p0", f"pass steps {self.num_steps}")

    def wait(self, request_id: str = "held") -> None:
        """Return when the request can go no further, anywhere."""
        self.cluster.wait_told(self.name, f"held {self.gate}", self.told)
        if self.num_steps:
            self.cluster.wait_told("p0", "held steps", self.told_prefill)
            assert self.cluster.record(request_id)["num_tokens"] == 0
        elif self.name == "d0":
            wait_until(lambda: self.cluster.record(request_id)["num_tokens"] == 1, "token 0")

    def go_on(self) -> None:
        """Let everything pass at the living."""
        for name in self.cluster.living():
            self.cluster.tell(name, f"pass {self.gate}")
            self.cluster.tell(name, "pass steps")


def stop_at(served: ServedModel, phase: str, expected: Expected) -> tuple[Stop, Future[Completion]]:
    """Send a request and return when it waits in a phase."""
    stop = Stop(served, phase)
    answer = served.ask_later(expected, "held")
    stop.wait()
    return stop, answer


def generations(served: ServedModel, request_id: str = "held") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.cluster.record(request_id)["generations"]
    return found


def has_first_token(served: ServedModel, request_id: str) -> bool:
    """Whether the router has token 0, and no other yet."""
    num_tokens: int = served.cluster.record(request_id)["num_tokens"]
    return num_tokens == 1


# --- the owner takes a lease away


def test_a_lease_ended_between_done_and_commit_is_computed_anew(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    refused = cluster.counters("d0").get("transfers_failed_commit_refused", 0)
    replans = cluster.metric(REPLANS.format("commit_refused"))
    stop, answer = stop_at(gemma3, "commit", expected)
    (lease,) = cluster.status("p0").leases
    assert (lease.state, lease.num_blocks) == ("SEALED", NUM_PULLED)
    cluster.tell("p0", "end_leases")
    assert not cluster.status("p0").leases
    stop.go_on()
    assert_exact(answer.result(ANSWER_S), expected)
    first, second = generations(gemma3)
    assert first["cause"].startswith("commit_refused")
    assert first["transfer"] is None
    assert second["num_tokens"] == expected.num_tokens - 1  # the first came from the prefill
    assert cluster.counters("d0")["transfers_failed_commit_refused"] == refused + 1
    assert cluster.metric(REPLANS.format("commit_refused")) == replans + 1


def test_a_lease_ended_before_its_seal_is_computed_anew(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    stop, answer = stop_at(gemma3, "pull while it is prefilled", expected)
    (lease,) = cluster.status("p0").leases
    assert (lease.state, lease.num_blocks) == ("OPEN", 6)  # full attention of one chunk of 96
    cluster.tell("p0", "end_leases")
    stop.go_on()
    assert_exact(answer.result(ANSWER_S), expected)
    first, *_, last = generations(gemma3)
    # Both workers report it; the decode worker's word, "peer_ended: lease_dead", may come first.
    assert "lease_dead" in first["cause"]
    # The prefill may have been over, and its token out, when it noticed.
    assert first["num_tokens"] + last["num_tokens"] == expected.num_tokens


@pytest.mark.parametrize("phase", PHASES)
def test_without_a_fault_what_was_stopped_goes_on(gemma3: ServedModel, phase: str) -> None:
    """Control: it is the fault that the other tests see, not the gate."""
    expected = gemma3.prompt(150)
    stop, answer = stop_at(gemma3, phase, expected)
    stop.go_on()
    assert_exact(answer.result(ANSWER_S), expected)
    handed_over(gemma3.cluster.record("held"))


# --- the prefill worker dies


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "decode"])
def test_the_prefill_worker_is_killed(gemma3: ServedModel, phase: str) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    stop, answer = stop_at(gemma3, phase, expected)
    num_tokens = cluster.record("held")["num_tokens"]
    cluster.workers["p0"].kill()
    if stop.name == "d0":
        # Destinations stay held while a READ may still write them, whoever died.
        wait_until(lambda: len(generations(gemma3)) == 2, "the router to plan anew")
        (inbound,) = cluster.status("d0").inbound
        assert 0 < inbound.num_blocks <= NUM_PULLED
        assert cluster.held()
    stop.go_on()
    assert_exact(answer.result(ANSWER_S), expected)
    first, second = generations(gemma3)
    assert first["cause"].split(":")[0] in ("worker_lost", "peer_lost", "read_failed")
    assert second["local"]
    assert second["decode"]["worker_id"] == "d0"
    assert second["num_prompt_tokens"] == 150 + num_tokens
    cluster.wait_quiescent()


def test_the_prefill_worker_is_killed_while_its_request_is_decoded(gemma3: ServedModel) -> None:
    """Nothing of it is needed any more. Its next life is a new epoch and serves again."""
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    stop, answer = stop_at(gemma3, "decode", expected)
    old = cluster.epochs["p0"]
    cluster.workers["p0"].kill()
    wait_until(lambda: "p0" not in cluster.known(), "the router to drop p0")
    stop.go_on()
    assert_exact(answer.result(ANSWER_S), expected)
    assert handed_over(cluster.record("held"))["prefill"]["epoch"] == old
    cluster.wait_quiescent()

    cluster.spawn("p0", "prefill")
    cluster.wait_ready("p0")
    assert cluster.epochs["p0"] != old
    generation = gemma3.serve(gemma3.prompt(150, salt="new"))
    assert generation["prefill"]["epoch"] == cluster.epochs["p0"]


# --- the decode worker dies


def test_the_decode_worker_is_killed_in_mid_stream(gemma3: ServedModel) -> None:
    """The stream goes on where it was, and the next life is used again."""
    cluster, expected = gemma3.cluster, gemma3.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    cluster.tell("d0", "pass steps 4")
    stream = cluster.client.completions.create(
        **gemma3.body(expected), stream=True, extra_headers={"X-Request-Id": "held"}
    )
    chunks = iter(stream)
    text, begun = "", "".join(expected.texts[:5])  # one token by the prefill worker
    while len(text) < len(begun):  # the router sends what has come meanwhile as one piece
        text += next(chunks).choices[0].text
    assert text == begun
    cluster.wait_told("d0", "held steps", told)
    cluster.workers["d0"].kill()
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == "".join(expected.texts)
    first, second = generations(gemma3)
    assert first["cause"].startswith("worker_lost")
    assert (first["num_tokens"], second["num_tokens"]) == (5, 25)
    assert second["num_prompt_tokens"] == 155
    cluster.wait_quiescent()

    old = cluster.epochs["d0"]
    cluster.spawn("d0", "decode")
    cluster.wait_ready("d0")
    generation = gemma3.serve(gemma3.prompt(150, salt="new"))
    assert generation["decode"]["epoch"] == cluster.epochs["d0"] != old


def test_with_every_worker_dead_there_is_an_error(gemma3: ServedModel) -> None:
    """Of a status of its own before the first token, inside the stream after it."""
    cluster, expected = gemma3.cluster, gemma3.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    client = RawClient(cluster.url, gemma3.body(expected, stream=True), "streamed")
    answer = gemma3.ask_later(expected, "whole")
    cluster.wait_told("d0", "held steps", told)
    for request_id in ("streamed", "whole"):
        wait_until(partial(has_first_token, gemma3, request_id), "token 0")
    for name in ("p0", "d0"):
        cluster.workers[name].kill()
    assert not is_exact(answer.result, expected)
    head, _, body = b"".join(client).partition(b"\r\n\r\n")
    events = [json.loads(line) for line in re.findall(rb"^data: (\{.*\})\r?$", body, re.MULTILINE)]
    assert head.startswith(b"HTTP/1.1 200")
    assert events[0]["choices"][0]["text"] == expected.texts[0]
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["type"] == "server_error"
    assert b"[DONE]" not in body
    for request_id in ("streamed", "whole"):
        assert cluster.record(request_id)["outcome"] == "failed"
    refused = cluster.http.post("/v1/completions", json=gemma3.body(expected))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "worker_unavailable"


# --- many requests


@pytest.mark.parametrize(("victim", "passes"), [("p0", 3), ("d0", 8)])
def test_many_requests_while_a_worker_is_killed(
    gemma3: ServedModel, victim: str, passes: int
) -> None:
    cluster = gemma3.cluster
    several = [gemma3.prompt(20 + 11 * n, 16, salt="many") for n in range(16)]
    told = cluster.tell(victim, "hold steps")
    cluster.tell(victim, f"pass steps {passes}")
    answers = [gemma3.ask_later(expected, f"many-{n}") for n, expected in enumerate(several)]
    cluster.wait_told(victim, "held steps", told)
    cluster.workers[victim].kill()
    exact = [is_exact(a.result, expected) for a, expected in zip(answers, several, strict=True)]
    assert all(exact)  # one worker is left and serves them all
    replanned = [n for n in range(16) if len(generations(gemma3, f"many-{n}")) > 1]
    assert replanned
    cluster.wait_quiescent()


# --- the client goes away


def cancelled(served: ServedModel, request_id: str) -> Callable[[], bool]:
    return lambda: served.cluster.record(request_id)["outcome"] == "cancelled"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_the_client_leaves(gemma3: ServedModel, phase: str, streamed: bool) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150, 30)
    stop = Stop(gemma3, phase)
    client = RawClient(cluster.url, gemma3.body(expected, stream=streamed), "leaves")
    stop.wait("leaves")
    client.close()
    wait_until(cancelled(gemma3, "leaves"), "the router to notice")
    assert len(generations(gemma3, "leaves")) == 1
    wait_until(lambda: only_under_way(gemma3), "the workers to let go")
    assert cluster.held()  # the step or the READ at the gate
    stop.go_on()
    cluster.wait_quiescent()
    gemma3.serve(expected)


def only_under_way(served: ServedModel) -> bool:
    """No request, no lease: what is held is held by a step or a READ."""
    stats = [served.cluster.status(name).stats for name in ("p0", "d0")]
    return not any(s.num_running + s.num_waiting + s.num_leases + s.num_reservations for s in stats)


def test_the_client_leaves_while_it_waits_for_a_step(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster
    running, other = gemma3.prompt(150), gemma3.prompt(60)

    def num_there() -> int:
        stats = cluster.status("p0").stats
        return stats.num_waiting + stats.num_running

    def num_leases() -> tuple[int, int]:
        prefill, decode = (cluster.status(name).stats for name in ("p0", "d0"))
        return prefill.num_leases, decode.num_reservations

    stop, answer = stop_at(gemma3, "prefill", running)
    # While the first step is held one more may be planned; these two fill it.
    second = gemma3.ask_later(other, "second")
    wait_until(lambda: num_there() == 2, "the second one to queue")
    client = RawClient(cluster.url, gemma3.body(other), "leaves")
    wait_until(lambda: num_leases() == (3, 3), "the third one to have its reservation")
    assert num_there() == 3
    client.close()
    wait_until(cancelled(gemma3, "leaves"), "the router to notice")
    wait_until(lambda: num_leases() == (2, 2), "its reservation and its lease to end")
    assert num_there() == 2
    stop.go_on()
    assert_exact(answer.result(ANSWER_S), running)
    assert_exact(second.result(ANSWER_S), other)
    assert generations(gemma3, "leaves")[0]["hit_tokens"] is None  # it never ran
