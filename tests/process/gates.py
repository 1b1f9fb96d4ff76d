"""Points at which a worker under test can be held: before a READ, its end, a check, a step."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from disagg.scheduling.step import Step, StepResult
from disagg.transfer.read_plan import ReadPlan
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.engines.protocol import Engine
from disagg.workers.transport import KVTransport


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Gate:
    """A point where calls can be held back and passed on later, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.passes: int | None = None
        """How many more go through; None: all."""
        self.waiting: deque[Callable[[], None]] = deque()
        self.lock = threading.Lock()

    def go(self, call: Callable[[], None]) -> None:
        with self.lock:
            self.waiting.append(call)
            self._let_through()
            if self.waiting:
                say(f"held {self.name}")

    def close(self) -> None:
        with self.lock:
            self.passes = 0

    def open(self, passes: int | None = None) -> None:
        with self.lock:
            self.passes = passes
            self._let_through()

    def _let_through(self) -> None:
        while self.waiting and self.passes != 0:
            if self.passes is not None:
                self.passes -= 1
            self.waiting.popleft()()


class GatedTransport:
    """NIXL, with gates before a READ is posted, before its end is reported, before a check."""

    def __init__(
        self,
        inner: KVTransport,
        reads: Gate,
        checks: Gate,
        on_read: Callable[[int, Sequence[int]], None],
    ) -> None:
        self.inner = inner
        self.reads = reads
        self.checks = checks
        self.on_read = on_read

    @property
    def failure(self) -> str:
        return self.inner.failure

    @property
    def num_reads(self) -> int:
        return self.inner.num_reads

    @property
    def num_in_progress(self) -> int:
        return self.inner.num_in_progress

    @property
    def oldest_in_progress_ms(self) -> int:
        return self.inner.oldest_in_progress_ms

    def local_pools(self) -> tuple[PoolInfo, ...]:
        return self.inner.local_pools()

    def add_peer(self, name: str, pools: Sequence[PoolInfo], plan: ReadPlan | None = None) -> None:
        self.inner.add_peer(name, pools, plan)

    def remove_peer(self, name: str) -> None:
        self.inner.remove_peer(name)

    def read(
        self,
        read_id: int,
        peer: str,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.on_read(read_id, dst_blocks)
        self.reads.go(lambda: self.inner.read(read_id, peer, src_blocks, dst_blocks, parts))

    def check(self) -> None:
        self.checks.go(self.inner.check)

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)


class HeldEngine:
    """The engine, with a gate before each step."""

    def __init__(self, inner: Engine, steps: Gate) -> None:
        self.inner = inner
        self.steps = steps
        self.num_steps = 0

    def prepare(self, step: Step) -> None:
        self.inner.prepare(step)

    def run(self, step: Step) -> StepResult:
        self.num_steps += 1
        passed = threading.Event()
        self.steps.go(passed.set)
        passed.wait()
        return self.inner.run(step)
