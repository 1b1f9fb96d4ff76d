"""disagg's side: a router, a prefill worker and a decode worker, and faults between them.

The decode worker is the production one with a gate before its READs: so a fault can lie between a
reservation that was granted and the READ. Nothing in the protocol waits for the gate.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stale_reads.questions import Prompt, Prompts, Row, Tally
from benchmarks.stale_reads.worker import NO_COMMIT
from tests.process.harness import MODEL, START_S, Cluster, wait_until
from tests.process.network import Network

OWNER_BLOCKS, READER_BLOCKS = 560, 1024
"""Of 16 tokens."""
WAVE = 12
"""Requests under one fault; their leases take about 260 of the owner's blocks."""
NUM_OTHERS = 64
"""Prompts that together fill more than the owner's pool: every free block is used again."""
ANSWER_S = 300.0
STRICT: dict[str, Any] = {
    "lease_ttl_ms": 5_000,
    "read_stuck_ms": 120_000,
    "quarantine_share_max": 0.9,
    "reserve_timeout_ms": 500,
    "reserve_passes_max": 1,
}
"""Nothing ends a transfer but the lease: the reader's own patience is longer than every fault."""
STRICT_ROUTER: dict[str, Any] = {"worker_silent_ms": 60_000}
DEFAULT_LEASE_S = 60


class Ours:
    """A cluster and what can be done to it.

    Args:
        checkpoint: what it serves.
        logs: the folder of the processes' logs.
        prompts: what is asked.
        strict: with `STRICT` instead of default settings.
        network: where the link between the two workers can be cut, if anywhere.
    """

    def __init__(
        self,
        checkpoint: Path,
        logs: Path,
        prompts: Prompts,
        *,
        strict: bool,
        network: Network | None = None,
    ) -> None:
        self._prompts = prompts
        self._network = network
        self._threads = ThreadPoolExecutor(WAVE)
        self._num_asked = 0
        self.between = Tally()
        """Requests that tried between faults whether a hand-over works."""
        options, router = (STRICT, STRICT_ROUTER) if strict else ({}, {})
        module = "benchmarks.stale_reads.worker"
        self._cluster = Cluster(checkpoint, logs, dict(options), dict(router), worker_module=module)
        if network is not None:
            self._cluster.places = dict(zip(("p0", "d0"), network.places, strict=True))
            self._cluster.router_options["host"] = network.host
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = str(free.getsockname()[1])

    def __enter__(self) -> "Ours":
        try:
            self._cluster.start()
            self._http = httpx.Client(base_url=self._cluster.url, timeout=ANSWER_S)
            self._spawn("p0")
            self._spawn("d0")
            self._cluster.wait_ready("p0", "d0")
        except BaseException:
            self._cluster.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.end()

    # --- rows

    def undisturbed(self, row: str, num: int) -> Row:
        """No fault."""
        found = Row()
        for prompts in self._waves(row, num):
            for prompt in prompts:
                self._judge(found.faulty, prompt, *self._ask(prompt))
            self._ask_again(found.again, prompts)
        return found

    def disturbed(self, row: str, num: int, fault: Callable[[], None]) -> Row:
        """Waves of requests whose READs are held back while ``fault`` goes on."""
        found = Row()
        for prompts in self._waves(row, num):
            self._wait_until_it_hands_over()
            self._cluster.tell("d0", "hold reads")
            asked = [self._threads.submit(self._ask, prompt) for prompt in prompts]
            wait_until(partial(self._all_admitted, asked), "READs to wait", ANSWER_S)
            fault()
            if "d0" in self._cluster.living():
                self._cluster.tell("d0", "pass reads")
            for prompt, answer in zip(prompts, asked, strict=True):
                self._judge(found.faulty, prompt, *answer.result())
            found.faulty.ends += self._recover()
            self._ask_again(found.again, prompts)
        return found

    # --- faults, while READs are held back

    def lease_ends_unheard(self) -> None:
        """The owner ends all leases, what it says of it is lost, and the blocks are used again."""
        self._cluster.tell("p0", "end_leases")
        self._use_all_blocks()

    def lease_lapses(self) -> None:
        """More than the default lease passes; the reader may hear of its end, or give up before."""
        time.sleep(DEFAULT_LEASE_S + 5)
        self._wait_until_leases_are_over()
        self._use_all_blocks()

    def reader_stops(self) -> None:
        """The reader is stopped until the leases are over and the blocks used again."""
        reader = self._cluster.workers["d0"]
        reader.stop()
        self._wait_until_leases_are_over()
        self._use_all_blocks()
        assert reader.popen.stdin is not None
        reader.popen.stdin.write("pass reads\n")  # so that it finds both at once when it wakes
        reader.popen.stdin.flush()
        reader.resume()

    def link_is_cut(self) -> None:
        """The READs are posted to a cut link, which comes back when the blocks were used again."""
        assert self._network is not None
        self._network.cut()
        self._cluster.tell("d0", "pass reads")
        self._wait_until_leases_are_over()
        self._use_all_blocks()
        self._network.mend()

    def owner_restarts(self) -> None:
        """The owner is killed and comes back under its name and address, with other requests."""
        self._cluster.workers["p0"].kill()
        self._spawn("p0")
        self._cluster.wait_ready("p0")
        self._use_all_blocks()

    def take_out_the_commit(self) -> None:
        """From now on the owner confirms every commit, also of a lease that is over."""
        self._cluster.tell("p0", NO_COMMIT)

    # --- inside

    def _waves(self, row: str, num: int) -> list[list[Prompt]]:
        return [self._prompts.asked(row, min(WAVE, num - n)) for n in range(0, num, WAVE)]

    def _spawn(self, name: str) -> None:
        if name == "p0":
            self._cluster.spawn(name, "prefill", num_blocks=OWNER_BLOCKS, port=self._port)
        else:
            self._cluster.spawn(name, "decode", num_blocks=READER_BLOCKS)

    def _ask(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[httpx.Response, str]:
        self._num_asked += 1
        request_id = f"stale-{self._num_asked}-{time.monotonic_ns()}"
        body = prompt.body() if max_tokens is None else prompt.body(max_tokens)
        answer = self._http.post(
            "/v1/completions",
            json=body | {"model": MODEL},
            headers={"X-Request-Id": request_id},
        )
        return answer, request_id

    def _judge(
        self, tally: Tally, prompt: Prompt, answer: httpx.Response, request_id: str
    ) -> list[dict[str, Any]]:
        """Count an answer; returns the request's generations."""
        if answer.status_code != 200:
            tally.failed(f"{answer.status_code} {answer.json()['error']['code']}")
            return []
        tally.answered(prompt, answer.json()["choices"][0]["text"])
        generations: list[dict[str, Any]] = self._cluster.record(request_id)["generations"]
        for generation in generations:
            if generation["cause"]:
                # Where its peer was the first to notice, what the peer said follows.
                cause = generation["cause"].removeprefix("peer_ended: ")
                tally.causes[cause.split(":")[0]] += 1
        return generations

    def _ask_again(self, tally: Tally, prompts: list[Prompt]) -> None:
        asked = [self._threads.submit(self._ask, prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, asked, strict=True):
            self._judge(tally, prompt, *answer.result())

    def _all_admitted(self, asked: list[Future[tuple[httpx.Response, str]]]) -> bool:
        leases = self._cluster.status("p0").leases
        sealed = sum(lease.state == "SEALED" for lease in leases)
        return sealed + sum(answer.done() for answer in asked) >= len(asked)

    def _wait_until_leases_are_over(self) -> None:
        wait_until(lambda: not self._cluster.status("p0").leases, "the leases' end", ANSWER_S)

    def _use_all_blocks(self) -> None:
        """Other users' prompts, computed by the owner alone: one token needs no hand-over."""
        others = self._prompts.others(NUM_OTHERS)
        with ThreadPoolExecutor(8) as threads:
            for answer, _ in threads.map(lambda prompt: self._ask(prompt, 1), others):
                answer.raise_for_status()

    def _recover(self) -> int:
        """Start the dead again, as the supervisor would; returns how many ended by themselves."""
        started: list[str] = []

        def all_ready() -> bool:
            dead = sorted({"p0", "d0"} - set(self._cluster.living()))
            for name in dead:
                self._spawn(name)
                self._cluster.wait_serving(name)
            started.extend(dead)
            known = self._cluster.known()
            return all(
                name in known
                and known[name]["info"]["incarnation"]["epoch"] == self._cluster.epochs[name]
                and known[name]["ready"]
                for name in ("p0", "d0")
            )

        wait_until(all_ready, "both workers to be ready", ANSWER_S)
        return len(started)

    def _wait_until_it_hands_over(self) -> None:
        """Ask until a request is handed over at once: pairs rest for a while after a failure."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self._recover()
            (prompt,) = self._prompts.asked("between faults", 1)
            generations = self._judge(self.between, prompt, *self._ask(prompt))
            if len(generations) == 1 and not generations[0]["local"]:
                return
            time.sleep(0.5)
        raise RuntimeError(f"nothing is handed over any more: {self._cluster.known()}")
