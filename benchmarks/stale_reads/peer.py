"""vLLM's side: two engines as 1P1D over its NixlConnector, in pull mode, and faults between them.

As its documents have it, the client (or a proxy) asks the prefill engine for one token, gets the
place of the KV, and asks the decode engine with it. Everything that is not said here is left at its
default: heartbeats, prefix cache, hybrid KV cache manager, what happens after a failed load.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.servers.vllm import FOR_REMOTE_DECODE, MODEL, Plan, VllmServer
from benchmarks.stale_reads.questions import Prompt, Prompts, Row, Tally
from tests.process.harness import HERE
from tests.process.network import Network, Place

OWNER_BLOCKS, READER_BLOCKS = 128, 512
"""Of 32 tokens."""
WAVE = 8
NUM_OTHERS = 40
"""Prompts that together fill more than the owner's pool."""
ANSWER_S = 180.0
DEFAULT_LEASE_S = 30


def plan(
    name: str,
    checkpoint: Path,
    num_blocks: int,
    lease_s: int | None = None,
    engine_id: str = "",
    place: Place = HERE,
) -> Plan:
    """How one of the two engines is started."""
    return Plan(
        name,
        checkpoint,
        max_model_tokens=1024,
        max_sequences=32,
        num_blocks=num_blocks,
        hands_over=True,
        lease_s=lease_s,
        engine_id=engine_id,
        transports="tcp,self",
        device=place.environment.get("UCX_NET_DEVICES", "lo"),
        host=place.host,
        prefix=place.command,
    )


class Engine(VllmServer):
    """A server, and a client of it."""

    def start(self) -> None:
        """See `Program`."""
        super().start()
        self.http = httpx.Client(base_url=self.url, timeout=ANSWER_S)


class Pair:
    """A prefill engine and a decode engine.

    Args:
        owner: how the prefill engine is started.
        reader: how the decode engine is started.
        python: an interpreter with vLLM.
        logs: the folder of their logs.
        prompts: what is asked.
        network: where the link between the two can be cut, if anywhere.
    """

    def __init__(
        self,
        owner: Plan,
        reader: Plan,
        python: Path,
        logs: Path,
        prompts: Prompts,
        network: Network | None = None,
    ) -> None:
        self._prompts = prompts
        self._network = network
        self._threads = ThreadPoolExecutor(WAVE)
        self._lease_s = owner.lease_s or DEFAULT_LEASE_S
        self.between = Tally()
        """Requests before each fault that showed that the pair hands over."""
        self.owner = Engine(owner, python, logs)
        try:
            self.reader = Engine(reader, python, logs)
        except BaseException:
            self.owner.end()
            raise

    def __enter__(self) -> "Pair":
        try:
            self.owner.wait_ready()
            self.reader.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.owner.end()
        self.reader.end()

    # --- rows

    def undisturbed(self, row: str, num: int) -> Row:
        """The decode engine is asked as soon as the prefill engine has answered."""
        found = Row()
        for prompts in self._waves(row, num):
            for prompt in prompts:
                self._decode(found.faulty, prompt, self._prefill(prompt))
            self._ask_again(found.again, prompts)
        return found

    def disturbed(self, row: str, num: int, fault: Callable[[Callable[[], None]], None]) -> Row:
        """Waves of requests with ``fault`` between prefill and READ.

        ``fault`` gets what asks the decode engine, and calls it at its moment.
        """
        found = Row()
        for prompts in self._waves(row, num):
            # One handed over as it should be: the two have met, and the pair works.
            (first,) = self._prompts.asked("between faults", 1)
            self._decode(self.between, first, self._prefill(first))
            places = list(self._threads.map(self._prefill, prompts))
            asked: list[Future[None]] = []
            fault(partial(self._start, asked, found.faulty, prompts, places))
            for answer in asked:
                answer.result()
            self._ask_again(found.again, prompts)
        return found

    def restarted(self, row: str, num: int, *, reader_too: bool) -> Row:
        """The owner is killed after its prefills and starts again with other requests.

        ``reader_too``: so does the reader, which then has not met the owner's earlier life.
        """
        found = Row()
        prompts = self._prompts.asked(row, num)
        places = list(self._threads.map(self._prefill, prompts))
        again = [self.owner, *[self.reader] * reader_too]
        for engine in again:
            engine.kill()
            engine.start()
        for engine in again:
            engine.wait_ready()
        self._use_all_blocks()
        for prompt, place in zip(prompts, places, strict=True):
            self._decode(found.faulty, prompt, place)
        self._ask_again(found.again, prompts)
        return found

    # --- faults

    def lease_lapses(self, ask: Callable[[], None]) -> None:
        """The decode engine is asked too late: a queue, a proxy or a client took its time."""
        time.sleep(self._lease_s + 1)
        self._use_all_blocks()
        ask()

    def reader_stops(self, ask: Callable[[], None]) -> None:
        """The decode engine has the request, and is stopped before it READs."""
        self.reader.stop()
        ask()
        time.sleep(self._lease_s + 1)
        self._use_all_blocks()
        self.reader.resume()

    def link_is_cut(self, ask: Callable[[], None]) -> None:
        """The link between the engines is cut for longer than the lease; HTTP reaches both."""
        assert self._network is not None
        self._network.cut()
        ask()
        time.sleep(self._lease_s + 1)
        self._use_all_blocks()
        self._network.mend()

    # --- inside

    def _waves(self, row: str, num: int) -> list[list[Prompt]]:
        return [self._prompts.asked(row, min(WAVE, num - n)) for n in range(0, num, WAVE)]

    def _prefill(self, prompt: Prompt) -> dict[str, Any]:
        body = prompt.body(1) | {"model": MODEL, "kv_transfer_params": FOR_REMOTE_DECODE}
        answer = self.owner.http.post("/v1/completions", json=body)
        answer.raise_for_status()
        place: dict[str, Any] = answer.json()["kv_transfer_params"]
        return place

    def _start(
        self,
        asked: list[Future[None]],
        tally: Tally,
        prompts: list[Prompt],
        places: list[dict[str, Any]],
    ) -> None:
        for prompt, place in zip(prompts, places, strict=True):
            asked.append(self._threads.submit(self._decode, tally, prompt, place))

    def _decode(self, tally: Tally, prompt: Prompt, place: dict[str, Any] | None) -> None:
        body = prompt.body() | {"model": MODEL}
        if place is not None:
            body["kv_transfer_params"] = place
        try:
            answer = self.reader.http.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            tally.failed(type(error).__name__)
            return
        if answer.status_code == 200:
            tally.answered(prompt, answer.json()["choices"][0]["text"])
        else:
            tally.failed(str(answer.status_code))

    def _ask_again(self, tally: Tally, prompts: list[Prompt]) -> None:
        """At the decode engine alone, without a hand-over."""
        for prompt in prompts:
            self._decode(tally, prompt, None)

    def _use_all_blocks(self) -> None:
        """Other users' prompts, computed by the owner alone."""

        def ask(prompt: Prompt) -> None:
            body = prompt.body(1) | {"model": MODEL}
            self.owner.http.post("/v1/completions", json=body).raise_for_status()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, self._prompts.others(NUM_OTHERS)))
