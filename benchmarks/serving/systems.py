"""The systems side by side: each is started as its users start it, and ended by its process ids."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from benchmarks.serving.load import MODEL, completion
from disagg.cluster.processes import ProcessId, end_processes, find_descendants, read_process

START_S = 900.0
END_S = 60.0
UNHINDERED = Path(__file__).parent / "unhindered"
MAX_MODEL_TOKENS = 12_288
MAX_STEP_TOKENS = 512
MAX_SEQUENCES = 64
BLOCK_TOKENS = 32
POOL_GIB = 2
"""Of each engine: nobody preempts or evicts."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "UCX_NET_DEVICES": "lo"}


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Program:
    """A program with a log, and all processes that descend from it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as sink:
            self._popen = subprocess.Popen(
                command, env=os.environ | THREADS | environment, stdout=sink, stderr=sink
            )
        found = read_process(self._popen.pid)
        assert found is not None
        self._identity = found[0]

    def check(self) -> None:
        """Raise RuntimeError if it has ended, with the end of its log."""
        if self._popen.poll() is not None:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.log.name} has ended:\n{tail}")

    def processes(self) -> set[ProcessId]:
        """It and all that descend from it."""
        return find_descendants({self._identity})

    def cpu_s(self) -> float:
        """CPU seconds of all of them, and of their ended children, so far."""
        total = 0
        for process in self.processes():
            try:
                text = Path(f"/proc/{process.pid}/stat").read_text()
            except OSError:
                continue
            total += sum(map(int, text[text.rindex(")") + 2 :].split()[11:15]))
        return total / TICKS_PER_S

    def end(self) -> None:
        """SIGTERM, then SIGKILL for what is left."""
        processes = self.processes()
        self._popen.terminate()
        end_processes(processes, timeout_s=END_S)
        self._popen.wait(END_S)


class System:
    """One system that serves; up between `start` and `end`.

    Attributes:
        name: in the figures.
    """

    name = ""

    def __init__(self, checkpoint: Path, python: Path, logs: Path) -> None:
        self._checkpoint, self._python, self._logs = checkpoint, python, logs
        self._programs: list[Program] = []
        self._urls: list[str] = []

    def start(self) -> float:
        """Start it; returns the seconds until it served."""
        started = time.monotonic()
        try:
            self._start()
            for url, program in zip(self._urls, self._programs, strict=True):
                self._wait_ready(url, program)
        except BaseException:
            self.end()
            raise
        return time.monotonic() - started

    def end(self) -> None:
        """End all its processes."""
        for program in self._programs:
            program.end()
        self._programs.clear()
        self._urls.clear()

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(program.cpu_s() for program in self._programs)

    def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
        """See `benchmarks.serving.load.Ask`."""
        return completion(client, self._urls[0], body)

    def _start(self) -> None:
        raise NotImplementedError

    def _run(self, name: str, command: Sequence[str], environment: dict[str, str]) -> Program:
        program = Program(command, environment, self._logs / name)
        self._programs.append(program)
        return program

    def _wait_ready(self, url: str, program: Program) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            program.check()
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not serve; see {program.log}")


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
            "worker.num_threads": 1,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.num_blocks": num_blocks,
            "scheduling.max_model_tokens": MAX_MODEL_TOKENS,
            "scheduling.max_step_tokens": MAX_STEP_TOKENS,
            "scheduling.max_sequences": MAX_SEQUENCES,
            "cluster.num_prefill": prefill,
            "cluster.num_decode": decode,
            "cluster.num_both": both,
        }

    def _block_bytes(self) -> int:
        config = json.loads((self._checkpoint / "config.json").read_text())
        heads: int = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
        return 2 * BLOCK_TOKENS * heads  # two layers a group, see plan_layout

    def _start(self) -> None:
        port = free_port()
        settings = [f"{key}={value}" for key, value in self._settings.items()]
        self._run(
            re.sub(r"\W+", "-", self.name),
            [
                *(str(self._python), "-m", "disagg.commands", "serve"),
                *("--model", str(self._checkpoint), "--name", MODEL),
                *("--http-port", str(port), "--grpc-port", "0"),
                *(part for setting in settings for part in ("--set", setting)),
            ],
            {"RAY_worker_niceness": "0"},
        )
        self._urls = [f"http://127.0.0.1:{port}"]

    def _wait_ready(self, url: str, program: Program) -> None:
        super()._wait_ready(url, program)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            program.check()
            workers = httpx.get(f"{url}/v1/disagg/workers", timeout=5).json()["workers"]
            if sum(worker["ready"] for worker in workers) == self._num_workers:
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} has not {self._num_workers} workers; see {program.log}")


class Vllm(System):
    """vLLM's own server, one engine."""

    name = "vLLM 0.32, one engine"
    _transfer: ClassVar[dict[str, str] | None] = None

    def _start(self) -> None:
        self._serve(free_port())

    def _serve(self, port: int) -> Program:
        options: dict[str, object] = {
            "model": self._checkpoint,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "max-model-len": MAX_MODEL_TOKENS,
            "max-num-seqs": MAX_SEQUENCES,
            "max-num-batched-tokens": MAX_STEP_TOKENS,
            "block-size": BLOCK_TOKENS,
        }
        if self._transfer is not None:
            options["kv-transfer-config"] = json.dumps(self._transfer)
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(UNHINDERED),
        }
        program = self._run(
            f"vllm-{port}",
            [
                *(str(self._python), "-m", "vllm.entrypoints.openai.api_server"),
                *(part for name, value in options.items() for part in (f"--{name}", str(value))),
                "--enforce-eager",
            ],
            environment,
        )
        self._urls.append(f"http://127.0.0.1:{port}")
        return program

    def _wait_ready(self, url: str, program: Program) -> None:
        super()._wait_ready(url, program)
        # It pins its model's thread to a core of its choice, two engines to the same one.
        for process in program.processes():
            for task in Path(f"/proc/{process.pid}/task").glob("*"):
                os.sched_setaffinity(int(task.name), range(os.cpu_count() or 1))


class VllmPair(Vllm):
    """vLLM as 1P1D over its NixlConnector; the client asks both, as its documents have it."""

    name = "vLLM 0.32, 1P1D over NixlConnector"
    _transfer: ClassVar = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
    }

    def _start(self) -> None:
        self._serve(free_port())
        self._serve(free_port())

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
        """Ask the prefill engine for one token, and the decode engine with what it answers."""
        remote = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": remote}
        prefill = await client.post(f"{self._urls[0]}/v1/completions", json=first)
        prefill.raise_for_status()
        place = prefill.json()["kv_transfer_params"]
        async for moment in completion(client, self._urls[1], body | {"kv_transfer_params": place}):
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


if sys.platform != "linux":
    raise SystemExit("processes are read from /proc: Linux only")
