"""Requests to a fleet that runs, and what they took: as a client sees it, and as a worker."""

import http.client
import itertools
import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from disagg.cluster.http_calls import open_call
from disagg.commands.router_client import as_router, call_router, own_key, told_of
from disagg.errors import ConfigError, RemoteFault, RequestError

ANSWER_S = 600.0
ANSWER_TOKENS = 33
BESIDE_ANSWER_TOKENS = 3 * ANSWER_TOKENS
"""Of those that keep other workers busy while a prompt of some hundred tokens is computed."""
BESIDE_TOKENS, BESIDE_S = 77, 0.1
"""Their prompts, and how long they go on before anything beside them is timed."""
ADMIN_S = 30.0
IDLE_S, IDLE_WAIT_S = 5.0, 0.1
"""What workers say of themselves is some tenths of a second old."""
RECORD_TRIES, RECORD_WAIT_S = 50, 0.02
"""The record of a request is complete shortly after its answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request took.

    Attributes:
        tpot_ms: between its tokens, in the mean.
        compute_ms: of its first token's time, what the worker that prefilled says its steps took;
            None: not asked for.
        second_ms: from its first token to its second, a hand-over's time included; None: unknown.
        num_cached: tokens of its prompt that its worker says it did not compute.
        beside_tpot_ms: between the tokens of requests beside it until its first one; None: there
            are none.
    """

    ttft_ms: float
    tpot_ms: float
    compute_ms: float | None = None
    second_ms: float | None = None
    num_cached: float = 0
    beside_tpot_ms: float | None = None

    @property
    def later_tpot_ms(self) -> float:
        """Between the tokens after the second, of an answer of `ANSWER_TOKENS`."""
        if self.second_ms is None:
            return self.tpot_ms
        num_gaps = ANSWER_TOKENS - 1
        return (self.tpot_ms * num_gaps - self.second_ms) / (num_gaps - 1)


class Measured(NamedTuple):
    """What the times of a worker depend on, as far as it says so when it registers."""

    fingerprint: str
    """Of its model."""
    dtype: str
    page_format: str
    """By which engines differ."""
    num_ranks: int
    block_tokens: tuple[int, ...]
    """By KV cache group."""
    max_model_tokens: int
    """Of prompt plus answer, in its pool."""
    max_sequences: int


class FleetWorker(NamedTuple):
    """A worker of a fleet that runs, as a router sees it."""

    worker_id: str
    epoch: str
    """Of its life."""
    role: str
    ready: bool
    measured: Measured


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Where requests go.

    Attributes:
        url: of a router's HTTP port.
        model: its name.
        admin: of the same router's admin port; "": workers are not asked what they took.
        hand_over: what its requests say of that; None: nothing.
    """

    url: str
    model: str
    admin: str = ""
    hand_over: bool | None = None

    def wait_until_idle(self) -> frozenset[FleetWorker]:
        """Let requests end that are about to, where there is an admin port to ask.

        Returns:
            The workers; none where nobody is asked.

        Raises:
            RemoteFault: somebody else is being served; nobody answers.
            ConfigError: the URL is none.
        """
        if not self.admin:
            return frozenset()
        ends_s = time.monotonic() + IDLE_S
        while True:
            workers, busy = self._workers()
            if not busy:
                return workers
            if time.monotonic() > ends_s:
                raise RemoteFault(f"the fleet is not idle: {', '.join(busy)} serve requests")
            time.sleep(IDLE_WAIT_S)

    def _workers(self) -> tuple[frozenset[FleetWorker], list[str]]:
        """All of them, and the names of those that are not idle."""
        path = "/v1/disagg/workers"
        told = call_router(self.admin, path, ADMIN_S, scope="see the workers")
        workers, busy = set(), []
        with as_router(self.admin):
            for one in told["workers"]:
                info, ready = one["info"], bool(one["ready"])
                name, epoch = (str(info["incarnation"][part]) for part in ("worker_id", "epoch"))
                workers.add(FleetWorker(name, epoch, str(info["role"]), ready, _measured(info)))
                if any((one["stats"] or {}).get(part) for part in ("num_running", "num_waiting")):
                    busy.append(name)
        return frozenset(workers), busy

    def model_tokens(self) -> int:
        """Of prompt plus answer, as anybody may ask.

        Raises:
            RemoteFault: nobody answers, or not as a router does.
            ConfigError: the URL is none.
        """
        path = f"/v1/models/{quote(self.model, safe='')}"
        told = call_router(self.url, path, ADMIN_S, scope="see the model")
        with as_router(self.url):
            return int(told["max_model_len"] or 0)

    def ask_at_once(self, prompts: Sequence[Sequence[int]], beside: int = 0) -> list[Asked]:
        """Ask requests together for `ANSWER_TOKENS` tokens each.

        Args:
            prompts: token ids, which nobody has asked before.
            beside: requests that have their first tokens by then and go on, on other workers.

        Raises:
            RemoteFault: nobody answers, or not as a router does.
            ConfigError: the URL is none.
        """
        with ThreadPoolExecutor(len(prompts) + beside) as threads:
            streams = [_Stream() for _ in range(beside)]
            others = [
                threads.submit(self.stream, prompt_of(BESIDE_TOKENS), one, BESIDE_ANSWER_TOKENS)
                for one in streams
            ]
            for stream, other in zip(streams, others, strict=True):
                _wait(stream.begun, other)
            if beside:
                time.sleep(BESIDE_S)
            asked = [threads.submit(self._ask, prompt, streams) for prompt in prompts]
            for other in others:
                other.result()
            return [one.result() for one in asked]

    def _ask(self, prompt: Sequence[int], others: Sequence["_Stream"]) -> Asked:
        mine = _Stream()
        request_id = self.stream(prompt, mine, ANSWER_TOKENS)
        seen_s = mine.seen_s
        compute_ms, num_cached = self._computed(request_id) if self.admin else (None, 0)
        meanwhile = [
            (after_s - before_s) * 1000
            for other in others
            for before_s, after_s in itertools.pairwise(other.seen_s)
            if mine.asked_s <= before_s and after_s <= seen_s[0]
        ]
        return Asked(
            ttft_ms=(seen_s[0] - mine.asked_s) * 1000,
            tpot_ms=(seen_s[-1] - seen_s[0]) * 1000 / (ANSWER_TOKENS - 1),
            compute_ms=compute_ms,
            second_ms=(seen_s[1] - seen_s[0]) * 1000,
            num_cached=num_cached,
            beside_tpot_ms=statistics.mean(meanwhile) if meanwhile else None,
        )

    def stream(self, prompt: Sequence[int], into: "_Stream", num_tokens: int) -> str:
        """Ask for so many tokens, and note when each came; returns the request's id.

        Raises:
            RemoteFault: nobody answers, or not as a router does.
            ConfigError: the URL is none.
        """
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is no http:// URL", param="--fleet")
        request_id = f"calibration-{uuid.uuid4().hex}"
        asked = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,  # or a token without text would come unseen
        }
        if self.hand_over is not None:
            asked["disagg"] = {"hand_over": self.hand_over}
        headers = own_key() | {"Content-Type": "application/json", "X-Request-Id": request_id}
        where = self.url.rstrip("/") + "/v1/completions"
        request = urllib.request.Request(where, json.dumps(asked).encode(), headers)
        into.asked_s = time.perf_counter()
        try:
            with as_router(where), open_call(request, ANSWER_S) as answer:
                for line in answer:
                    if line.startswith(b"data: {") and _has_token(line):
                        into.seen_s.append(time.perf_counter())
                        into.begun.set()
        except urllib.error.HTTPError as error:
            raise RemoteFault(f"{where} answered {error.code}: {told_of(error)[0]}") from error
        except (OSError, http.client.HTTPException) as error:
            raise RemoteFault(f"nobody answers at {where}: {error}") from error
        if len(into.seen_s) < 2:
            raise RemoteFault(f"{where} answered without tokens")
        return request_id

    def _computed(self, request_id: str) -> tuple[float, int]:
        """What the steps of its prompt took, and how many tokens they did not compute."""
        path = f"/v1/disagg/requests/{request_id}"
        for _ in range(RECORD_TRIES):
            try:
                record = call_router(
                    self.admin, path, ADMIN_S, scope="see this request", record=True
                )
            except RequestError:
                record = {"generations": ()}
            with as_router(self.admin):
                if record["generations"] and (times := record["generations"][-1]["prefill_times"]):
                    return float(times["compute_ms"]), int(record["cached_tokens"])
            time.sleep(RECORD_WAIT_S)
        raise RemoteFault(f"{self.admin} does not say what {request_id} took")


@dataclass(slots=True)
class _Stream:
    """A request that goes on: when it was asked, and its tokens came, in s of one clock."""

    asked_s: float = 0.0
    seen_s: list[float] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)


def _measured(info: Mapping[str, Any]) -> Measured:
    contract = info["contract"]
    return Measured(
        str(contract["model_fingerprint"]),
        str(contract["dtype"]),
        str(contract["page_format"]),
        int(contract["num_ranks"]),
        tuple(int(group["block_tokens"]) for group in info["groups"]),
        int(info["max_model_tokens"]),
        int(info["max_sequences"]),
    )


def prompt_of(num_tokens: int) -> list[int]:
    """Token ids in an order that no other prompt has."""
    return [random.randrange(10, 250) for _ in range(num_tokens)]


def _wait(event: threading.Event, request: Future[str]) -> None:
    while not event.wait(0.05):
        if request.done():
            request.result()  # raises what it raised
            return


def _has_token(line: bytes) -> bool:
    """Whether a line is a chunk of the answer, or an error, which is raised."""
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise RemoteFault(f"the fleet answered {chunk['error']}")
    return bool(chunk["choices"])
