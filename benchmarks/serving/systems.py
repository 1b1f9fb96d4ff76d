"""The systems side by side: each is started as its users start it, and ended by its process ids."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.servers.program import START_S, Program, free_port
from benchmarks.servers.vllm import BLOCK_TOKENS, FOR_REMOTE_DECODE, MODEL, Plan, VllmServer
from benchmarks.serving.load import completion

MAX_MODEL_TOKENS = 12_288
MAX_STEP_TOKENS = 512
MAX_SEQUENCES = 64
POOL_GIB = 2
"""Of each engine: nobody preempts or evicts."""


class System:
    """One system that serves; up between `start` and `end`.

    Attributes:
        name: in the figures.
    """

    name = ""

    def __init__(self, checkpoint: Path, python: Path, logs: Path) -> None:
        self._checkpoint, self._python, self._logs = checkpoint, python, logs
        self._programs: list[Program] = []

    @property
    def url(self) -> str:
        """Where the client asks; of two engines that it has to ask both, the first."""
        return self._programs[0].url

    def start(self) -> float:
        """Start it; returns the seconds until it served."""
        started = time.monotonic()
        try:
            self._start()
            for program in self._programs:
                self._wait_ready(program)
        except BaseException:
            self.end()
            raise
        return time.monotonic() - started

    def end(self) -> None:
        """End all its processes."""
        for program in self._programs:
            program.end()
        self._programs.clear()

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(program.cpu_s() for program in self._programs)

    def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
        """See `benchmarks.serving.load.Ask`."""
        return completion(client, self.url, body)

    def _start(self) -> None:
        raise NotImplementedError

    def _wait_ready(self, program: Program) -> None:
        program.wait_ready()


class Disagg(System):
    """disagg by `disagg serve`, with a number of workers of each role."""

    def __init__(
        self,
        checkpoint: Path,
        python: Path,
        logs: Path,
        *,
        engine: str = "vllm",
        prefill: int = 0,
        decode: int = 0,
        both: int = 0,
        num_threads: int = 1,
    ) -> None:
        super().__init__(checkpoint, python, logs)
        workers = f"{both} of both roles" if both else f"{prefill}P{decode}D"
        self.name = f"disagg {workers} ({engine})"
        self._num_workers = prefill + decode + both
        num_blocks = POOL_GIB * (1 << 30) // self._block_bytes()
        self._settings = {
            "worker.engine": engine,
            "worker.device": "cpu",
            "worker.dtype": "float32",
            "worker.num_threads": num_threads,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.num_blocks": num_blocks,
            "scheduling.max_model_tokens": MAX_MODEL_TOKENS,
            "scheduling.max_step_tokens": MAX_STEP_TOKENS,
            "scheduling.max_sequences": MAX_SEQUENCES,
            "cluster.num_prefill": prefill,
            "cluster.num_decode": decode,
            "cluster.num_both": both,
            "router.policy": "prefix_then_load",  # 1P1D hands over, as the peer does
        }

    def _block_bytes(self) -> int:
        config = json.loads((self._checkpoint / "config.json").read_text())
        heads: int = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
        return 2 * BLOCK_TOKENS * heads  # two layers a group, see plan_layout

    def _start(self) -> None:
        port, self._admin_port = free_port(), free_port()
        settings = [f"{key}={value}" for key, value in self._settings.items()]
        command = [
            *(str(self._python), "-m", "disagg.commands", "serve"),
            *("--model", str(self._checkpoint), "--name", MODEL),
            *("--http-port", str(port), "--grpc-port", "0"),
            *("--set", f"router.admin_port={self._admin_port}"),
            *(part for setting in settings for part in ("--set", setting)),
        ]
        environment = {
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": str(self._settings["worker.num_threads"]),
        }
        log = self._logs / re.sub(r"\W+", "-", self.name)
        self._programs.append(Program(command, environment, log, f"http://127.0.0.1:{port}"))

    def _wait_ready(self, program: Program) -> None:
        super()._wait_ready(program)

        def all_ready() -> bool:
            url = f"http://127.0.0.1:{self._admin_port}/v1/disagg/workers"
            workers = httpx.get(url, timeout=5).json()["workers"]
            return [worker["ready"] for worker in workers].count(True) == self._num_workers

        program.wait_until(all_ready)


class Vllm(System):
    """vLLM's own server, one engine, unhindered."""

    name = "vLLM 0.32, one engine"

    def _start(self) -> None:
        self._serve("vllm")

    def _serve(self, name: str, *, hands_over: bool = False) -> None:
        plan = Plan(
            name,
            self._checkpoint,
            MAX_MODEL_TOKENS,
            MAX_SEQUENCES,
            MAX_STEP_TOKENS,
            POOL_GIB,
            unhindered=True,
            hands_over=hands_over,
        )
        self._programs.append(VllmServer(plan, self._python, self._logs))


class VllmPair(Vllm):
    """vLLM as 1P1D over its NixlConnector; the client asks both, as its documents have it."""

    name = "vLLM 0.32, 1P1D over NixlConnector"

    def _start(self) -> None:
        self._serve("vllm-prefill", hands_over=True)
        self._serve("vllm-decode", hands_over=True)

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
        """Ask the prefill engine for one token, and the decode engine with what it answers."""
        prefill, decode = (program.url for program in self._programs)
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": FOR_REMOTE_DECODE}
        answer = await client.post(f"{prefill}/v1/completions", json=first)
        answer.raise_for_status()
        place = answer.json()["kv_transfer_params"]
        async for moment in completion(client, decode, body | {"kv_transfer_params": place}):
            yield moment


def warm_up(system: System, vocab_size: int) -> None:
    """A short and a long request, so that nothing is first when it is measured."""

    async def ask(prompt_tokens: int) -> None:
        body = {
            "model": MODEL,
            "prompt": [5 + n % (vocab_size - 5) for n in range(prompt_tokens)],
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.0,
        }
        async with httpx.AsyncClient(timeout=START_S) as client:
            assert [moment async for moment in system.ask(client, body)]

    for prompt_tokens in (200, 1_500):
        asyncio.run(ask(prompt_tokens))
