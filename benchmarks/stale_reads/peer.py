"""vLLM's side: two engines as 1P1D over its NixlConnector, in pull mode, and faults between them.

As its documents have it, the client (or a proxy) asks the prefill engine for one token, gets the
place of the KV, and asks the decode engine with it. Everything that is not said here is left at its
default: heartbeats, prefix cache, hybrid KV cache manager, what happens after a failed load.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stale_reads.questions import Prompt, Prompts, Row, Tally
from disagg.cluster.processes import ProcessId, end_processes, find_descendants, read_process
from tests.process.harness import HERE, wait_until
from tests.process.network import Network, Place

MODEL = "tiny"
OWNER_BLOCKS, READER_BLOCKS = 128, 512
"""Of 32 tokens, the fewest that its attention on the CPU takes."""
WAVE = 8
NUM_OTHERS = 40
"""Prompts that together fill more than the owner's pool."""
START_S, ANSWER_S = 900.0, 180.0
DEFAULT_LEASE_S = 30
REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def free_port() -> int:
    """A port that nobody listens at on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Plan:
    """What one engine is started with."""

    name: str
    num_blocks: int
    lease_s: int | None = None
    """None: vLLM's default."""
    engine_id: str = ""
    """"" leaves it to vLLM, which takes a new one at every start."""
    place: Place = HERE
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)

    def command(self, python: Path, checkpoint: Path) -> list[str]:
        """The command line of its server."""
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        }
        if self.lease_s is not None:
            transfer["kv_connector_extra_config"] = {"kv_lease_duration": self.lease_s}
        if self.engine_id:
            transfer["engine_id"] = self.engine_id
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "model": checkpoint,
            "served-model-name": MODEL,
            "host": self.place.host,
            "port": self.port,
            "dtype": "float32",
            "max-model-len": 1024,
            "max-num-seqs": 32,
            "max-num-batched-tokens": 512,
            "block-size": 32,
            "num-gpu-blocks-override": self.num_blocks,
            "kv-transfer-config": json.dumps(transfer),
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [*self.place.command, *server, *flags, "--enforce-eager"]

    def environment(self) -> dict[str, str]:
        """What vLLM and UCX read."""
        return {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": self.place.host,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.place.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": self.place.environment.get("UCX_NET_DEVICES", "lo"),
        }


class Engine:
    """One vLLM server with its engine's processes; ended by the pids that it started."""

    def __init__(self, plan: Plan, python: Path, checkpoint: Path, logs: Path) -> None:
        self.plan = plan
        self._command = plan.command(python, checkpoint)
        self._log = logs / plan.name
        self.start()

    def start(self) -> None:
        """Start it, or start it again with the same command; `wait_ready` waits for it."""
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command, env=os.environ | self.plan.environment(), stdout=log, stderr=log
            )
        found = read_process(self._popen.pid)
        assert found is not None
        self._identity = found[0]
        self.http = httpx.Client(
            base_url=f"http://{self.plan.place.host}:{self.plan.port}", timeout=ANSWER_S
        )

    def wait_ready(self) -> None:
        """Until it serves."""

        def serves() -> bool:
            if self._popen.poll() is not None:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"vLLM's {self.plan.name} ended at its start:\n{tail}")
            try:
                return self.http.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(serves, f"vLLM's {self.plan.name}", START_S)

    def processes(self) -> set[ProcessId]:
        """The server and all that it started."""
        return find_descendants({self._identity})

    def stop(self) -> None:
        """SIGSTOP to the engine; its server goes on accepting requests."""
        for process in self.processes() - {self._identity}:
            os.kill(process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        for process in self.processes():
            os.kill(process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the server and the engine, as a crash of the container would."""
        end_processes(self.processes(), timeout_s=0.0)
        self._popen.wait(60)

    def end(self) -> None:
        """Ask to stop, then insist."""
        self.resume()
        processes = self.processes()
        self._popen.terminate()
        end_processes(processes, timeout_s=40)
        self._popen.wait(60)


class Pair:
    """A prefill engine and a decode engine.

    Args:
        owner: how the prefill engine is started.
        reader: how the decode engine is started.
        python: an interpreter with vLLM.
        checkpoint: what they serve.
        logs: the folder of their logs.
        prompts: what is asked.
        network: where the link between the two can be cut, if anywhere.
    """

    def __init__(
        self,
        owner: Plan,
        reader: Plan,
        python: Path,
        checkpoint: Path,
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
        self.owner = Engine(owner, python, checkpoint, logs)
        try:
            self.reader = Engine(reader, python, checkpoint, logs)
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
        body = prompt.body(1) | {"model": MODEL, "kv_transfer_params": REMOTE}
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
