"""Nodes with real NIXL in processes of their own, and what a test asks of them."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.forked import Forked
from tests.process.harness import is_stopped, wait_until
from tests.process.transport_node import block_bytes_of, digest

NUM_BLOCKS = 64
BLOCK_BYTES = 4096
HANDLE_BYTES_MAX = 2 * BLOCK_BYTES
BOUND_S = 60.0


class Process:
    """A node in a process of its own; every wait is bounded.

    Forked, as its imports take 1.6 s; but where ``ends_itself`` it has an interpreter of its own,
    whose end is a part of what is tested.
    """

    def __init__(
        self, name: str, seed: int, tls: str, *, ends_itself: bool = False, **different: Any
    ) -> None:
        self.name, self.seed = name, seed
        options = {
            "name": name,
            "seed": seed,
            "num_blocks": NUM_BLOCKS,
            "block_bytes": BLOCK_BYTES,
            "handle_bytes_max": HANDLE_BYTES_MAX,
            **different,
        }
        env = {**os.environ, "OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": "lo"}
        env.pop("UCX_TLS", None)
        if tls:
            env["UCX_TLS"] = tls
        module, argument = "tests.process.transport_node", json.dumps(options)
        self._process: subprocess.Popen[str] | Forked
        if ends_itself:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                cwd=Path(__file__).parents[2],
            )
        else:
            self._process = Forked(module, argument, env, "/dev/stderr")
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"error": "the process ended"})

    def ready(self) -> "Process":
        self.info = self._answer()
        return self

    def _answer(self) -> Any:
        answer = self._answers.get(timeout=60 + BOUND_S)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def invoke(**arguments: Any) -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"call": call, "with": arguments}) + "\n")
            self._process.stdin.flush()
            return self._answer()

        return invoke

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(BOUND_S)
        if number == signal.SIGSTOP:  # its threads stop one by one, and each may still answer
            wait_until(lambda: is_stopped(self._process.pid), "the stop")

    def end(self) -> int:
        """Let the process end by itself; its exit status."""
        assert isinstance(self._process, subprocess.Popen), "forked: no end of its own"
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.stdin.close()
            try:
                self._process.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
        return self._process.returncode


class World:
    """A reader and its owners."""

    def __init__(self, tls: str) -> None:
        self.tls = tls
        self.processes: list[Process] = []
        self._read_ids = itertools.count(1)

    def start(self, name: str, seed: int, **different: Any) -> Process:
        process = Process(name, seed, self.tls, **different)
        self.processes.append(process)
        return process

    def owner(self, name: str, seed: int) -> Process:
        return self.start(name, seed).ready()

    def read(self, reader: Process, owner: str, src: list[int], dst: list[int]) -> int:
        read_id = next(self._read_ids)
        reader.read(read_id=read_id, peer=owner, src=src, dst=dst)
        return read_id

    def kill(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGKILL)


def expected(seed: int, block: int) -> str:
    return digest(block_bytes_of(seed, block, BLOCK_BYTES))


def ended(reader: Process, read_id: int) -> str:
    """The error of a read's one end, "" when it went well."""
    ends: list[str] = reader.wait(read_id=read_id, timeout_s=BOUND_S)
    assert len(ends) == 1, f"read {read_id} ended {len(ends)} times; {reader.state()}"
    return ends[0]


def until(reader: Process, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll the reader's state until it is as wanted."""
    by_s = time.monotonic() + BOUND_S
    while True:
        state: dict[str, Any] = reader.state()
        if holds(state):
            return state
        assert time.monotonic() < by_s, f"still {state}"


@pytest.fixture(params=["", "tcp"], ids=["shm", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.kill()


@pytest.fixture
def tcp_world() -> Iterator[World]:
    """Over TCP a stopped owner's READs stay in progress; shared memory needs no owner."""
    world = World("tcp")
    yield world
    world.kill()


def pair(world: World, **different: Any) -> tuple[Process, Process]:
    owner = world.start("owner:1", seed=1, **different)
    reader = world.start("reader:1", seed=2, **different)
    owner.ready()
    reader.ready()
    reader.add(name=owner.name, info=owner.info)
    return owner, reader
