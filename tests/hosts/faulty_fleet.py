"""Routers and workers on hosts, started directly, and load whose every token is checked and timed."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from disagg.cluster.processes import find_children
from tests.checkpoints import reference_generate
from tests.hosts.hosts import ROOT, Host
from tests.process.harness import MODEL, Process, wait_until
from tests.process.network import Place
from tests.process.replicas import Replicas, Router, stream

NUM_STREAMS = 6
NUM_PROMPTS = 6
PROMPT_TOKENS = (40, 150)
NUM_TOKENS = 64
GAP_MIN = 1e-3
REQUEST_S = 240.0
"""Only a request that nobody ends takes so long."""
HTTP_PORT, GRPC_PORT, ADMIN_PORT = 8000, 8100, 8200


@dataclass(frozen=True)
class Expected:
    """A prompt and what plain transformers in one process makes of it."""

    prompt: list[int]
    token_ids: list[int]


def expect(
    model_dir: Path, length: int, num_tokens: int, salt: str, start: Sequence[int] = ()
) -> Expected:
    """A prompt whose every token the reference is clear about."""
    for attempt in range(200):
        rng = random.Random(f"{salt}/{attempt}")
        prompt = [*start, *(rng.randrange(7, 101) for _ in range(length - len(start)))]
        token_ids, _, gap = reference_generate(model_dir, prompt, num_tokens)
        if gap > GAP_MIN:
            return Expected(prompt, list(token_ids))
    raise AssertionError("no prompt whose answer is clear")


def place_on(host: Host) -> Place:
    """Where a process that the test starts there runs; it ends with the test."""
    command = (*host.space.all, "setpriv", "--pdeathsig", "KILL")
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wire", "PYTHONPATH": str(ROOT)}
    return Place(host.address, command, environment | {"HOME": "/root"})


class FaultyFleet:
    """Two routers on the first host, and one worker on each of the others.

    To be used in the network of the first host: `Host.network`.
    """

    def __init__(self, machines: Sequence[Host], folder: Path, model_dir: Path) -> None:
        self.front, *others = machines
        self.host_of = dict(zip(("p0", "p1", "d0", "d1"), others, strict=True))
        self.replicas = Replicas(
            model_dir,
            folder,
            {"pull_tokens_min": 32, "decode_prefill_tokens_max": 16},
            {"max_step_tokens": 96, "num_blocks": 512},
            places={name: place_on(self.front) for name in ("r0", "r1")},
        )
        self.replicas.places |= {name: place_on(host) for name, host in self.host_of.items()}

    def start(self) -> None:
        """Start all; returns when both routers have every worker ready."""
        replicas = self.replicas
        for number, name in enumerate(("r0", "r1")):
            ports = (HTTP_PORT, GRPC_PORT, ADMIN_PORT)
            names = ("http_port", "grpc_port", "admin_port")
            given = {one: port + number for one, port in zip(names, ports, strict=True)}
            replicas.start_router(name, **given)
        replicas.roles |= {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
        for name in replicas.roles:
            replicas.start_worker(name)
        replicas.wait_ready()

    def come_back(self, name: str) -> None:
        """Start a worker again whose host was killed and runs again; nobody waits for it."""
        self.replicas.places[name] = place_on(self.host_of[name])
        self.replicas.workers[name].kill()
        self.replicas.start_worker(name)

    @property
    def first(self) -> Router:
        """The router whose view counts."""
        return self.replicas.routers["r0"]

    def process_of(self, process: Process) -> int:
        """The pid of what runs on a host; what was started is the program that entered it."""
        (child,) = find_children(process.popen.pid)
        return child.pid

    def is_gone(self, name: str) -> bool:
        """Whether the first router has dropped a worker, or sends it nothing."""
        known = self.first.workers().get(name)
        return known is None or not known["connected"]

    def is_whole(self) -> bool:
        """Whether every router that runs has every worker, ready."""
        with contextlib.suppress(httpx.TransportError):
            for router in self.replicas.routers.values():
                ready = [name for name, view in router.workers().items() if view["ready"]]
                if sorted(ready) != sorted(self.host_of):
                    return False
            return True
        return False


@dataclass
class Sent:
    """One request of the load."""

    request_id: str
    router: str
    expected: Expected
    began_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    ended_s: float = 0.0

    def stood_s(self, from_s: float) -> float:
        """Longest time without a token since then."""
        times = [max(from_s, one) for one in (self.began_s, *self.token_s, self.ended_s)]
        return max(later - one for one, later in zip(times, times[1:], strict=False))


class Load:
    """Streams that follow each other, checked token by token. A router that cannot be reached, or
    that ends a stream, is left for the other one."""

    def __init__(self, fleet: FaultyFleet, prompts: Sequence[Expected], routers: Sequence[str]):
        self.sent: list[Sent] = []
        self._fleet, self._prompts, self._routers = fleet, prompts, routers
        self._ends = threading.Event()
        self._wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def num_tokens(self, since_s: float = 0.0) -> int:
        """Tokens that have come since a time."""
        return sum(one > since_s for sent in list(self.sent) for one in list(sent.token_s))

    def end(self) -> None:
        """Let the last requests end; all that came was right, or said why not."""
        self._ends.set()
        for thread in self._threads:
            thread.join(REQUEST_S + 60)
            assert not thread.is_alive(), "a request does not end"
        assert not self._wrong, self._wrong

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        routers = self._fleet.replicas.routers
        own = {
            name: httpx.Client(base_url=routers[name].url, timeout=REQUEST_S) for name in routers
        }
        router = number % len(self._routers)
        for turn in range(1 << 30):
            if self._ends.is_set():
                return
            name = self._routers[router]
            request_id = f"load-{time.monotonic_ns()}-{number}-{turn}"
            sent = Sent(request_id, name, rng.choice(self._prompts), time.monotonic())
            self.sent.append(sent)
            if not self._stream(own[name], sent):
                router = (router + 1) % len(self._routers)
                time.sleep(0.05)

    def _stream(self, client: httpx.Client, sent: Sent) -> bool:
        """Returns whether the router answered."""
        expected = sent.expected
        body = {
            "model": MODEL,
            "prompt": expected.prompt,
            "max_tokens": len(expected.token_ids),
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        done = False
        try:
            for event in stream(client, body, sent.request_id):
                if event == "[DONE]":
                    done = True
                    continue
                said = json.loads(event)
                if "error" in said:
                    sent.error = said["error"]["message"] or "an error that says nothing"
                    continue
                new = said["choices"][0].get("token_ids") or []
                sent.token_ids += new
                sent.token_s += [time.monotonic()] * len(new)
        except httpx.HTTPStatusError as error:
            sent.error = error.response.text
        except httpx.TransportError as error:
            sent.error = f"no connection: {error!r}"
        sent.ended_s = time.monotonic()
        begun = expected.token_ids[: len(sent.token_ids)]
        if sent.token_ids != begun or not (sent.error or (done and begun == expected.token_ids)):
            self._wrong.append(f"{sent.request_id}: {sent.token_ids} instead of {expected}")
        return not sent.error.startswith("no connection")


@contextlib.contextmanager
def load(
    fleet: FaultyFleet, prompts: Sequence[Expected], routers: Sequence[str]
) -> Iterator[Load]:
    """Load until the end, which waits for every request."""
    made = Load(fleet, prompts, routers)
    try:
        wait_until(lambda: made.num_tokens() > NUM_STREAMS * NUM_TOKENS, "load", REQUEST_S)
        yield made
    finally:
        made.end()
