"""A real worker process whose test can hold it at a point, corrupt it, or make it forget.

Commands on standard input, one a line; every answer and event is a line on standard output:

    hold steps|reads|dones      from now on nothing passes that point; "held POINT" when one waits
    pass steps|reads|dones      let everything go on
    corrupt GROUP               overwrite every block pulled for that group, after each READ
    intact                      stop corrupting
    poison                      fill every block that is free and not cached with NaN
    end_leases                  end all leases without telling the reader
"""

import json
import queue
import sys
import threading
from collections.abc import Callable, Sequence

from disagg.scheduling.step import Step, StepResult
from disagg.workers.engine.engine import Engine
from disagg.workers.options import WorkerOptions
from disagg.workers.transport import KVTransport, TransportInfo
from disagg.workers.worker import Worker, nixl_transport


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Gate:
    """A point where calls can be held back and passed on later, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.waiting: queue.Queue[Callable[[], None]] = queue.Queue()
        self.lock = threading.Lock()

    def go(self, call: Callable[[], None]) -> None:
        with self.lock:
            if self.closed:
                self.waiting.put(call)
                say(f"held {self.name}")
                return
        call()

    def close(self) -> None:
        with self.lock:
            self.closed = True

    def open(self) -> None:
        with self.lock:
            self.closed = False
            while not self.waiting.empty():
                self.waiting.get()()


class GatedTransport:
    """NIXL, with gates before a READ is posted and before its end is reported."""

    def __init__(
        self, inner: KVTransport, reads: Gate, on_read: Callable[[int, Sequence[int]], None]
    ) -> None:
        self.inner = inner
        self.reads = reads
        self.on_read = on_read

    def local_info(self) -> TransportInfo:
        return self.inner.local_info()

    def add_peer(self, name: str, info: TransportInfo) -> None:
        self.inner.add_peer(name, info)

    def remove_peer(self, name: str) -> None:
        self.inner.remove_peer(name)

    def read(
        self, read_id: int, peer: str, src_blocks: Sequence[int], dst_blocks: Sequence[int]
    ) -> None:
        self.on_read(read_id, dst_blocks)
        self.reads.go(lambda: self.inner.read(read_id, peer, src_blocks, dst_blocks))

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)


class HeldEngine:
    """The engine, with a gate before each step."""

    def __init__(self, inner: Engine, steps: Gate) -> None:
        self.inner = inner
        self.steps = steps

    def run(self, step: Step) -> StepResult:
        passed = threading.Event()
        self.steps.go(passed.set)
        passed.wait()
        return self.inner.run(step)


class WorkerUnderTest:
    def __init__(self, options: WorkerOptions) -> None:
        self.gates = {name: Gate(name) for name in ("steps", "reads", "dones")}
        self.corrupt: set[int] = set()
        self.group_of: dict[int, int] = {}
        self.engine: Engine | None = None
        self.reads: dict[int, Sequence[int]] = {}
        self.worker = Worker(options, transport_factory=self.make_transport)

    def make_transport(
        self,
        agent: str,
        engine: Engine,
        on_read_done: Callable[[int, str], None],
        handle_bytes_max: int,
    ) -> KVTransport:
        self.engine = engine

        def done(read_id: int, error: str) -> None:
            self.spoil(read_id)
            self.gates["dones"].go(lambda: on_read_done(read_id, error))

        inner = nixl_transport(agent, engine, done, handle_bytes_max)
        return GatedTransport(inner, self.gates["reads"], self.remember)

    def remember(self, read_id: int, dst_blocks: Sequence[int]) -> None:
        """Which group each destination serves; called on the control thread."""
        self.reads[read_id] = dst_blocks
        assert self.worker.control is not None
        for pull in self.worker.control.core.incoming.pulls.values():
            for group, lacks in enumerate(pull.reservation.lacks):
                self.group_of.update({block: group for _, block in lacks})

    def spoil(self, read_id: int) -> None:
        """Overwrite the first block of a group to be corrupted: one block is enough."""
        assert self.engine is not None
        left = set(self.corrupt)
        for block in self.reads.pop(read_id):
            group = self.group_of.get(block, -1)
            if group in left:
                left.discard(group)
                self.engine.pool.tensor[block].view(self.engine.pool.dtype).mul_(-3).add_(0.5)
                say(f"corrupted {group} {block}")

    def start(self) -> None:
        self.worker.start()
        control = self.worker.control
        assert control is not None
        assert self.engine is not None
        control._engine = HeldEngine(self.engine, self.gates["steps"])
        incarnation = self.worker.incarnation
        say("serving " + json.dumps({"address": self.worker.address, "epoch": incarnation.epoch}))

    def command(self, line: str) -> None:
        match line.split():
            case ["hold", name]:
                self.gates[name].close()
            case ["pass", name]:
                self.gates[name].open()
            case ["corrupt", group]:
                self.corrupt.add(int(group))
            case ["intact"]:
                self.corrupt.clear()
            case ["poison"]:
                self.on_loop(self.poison)
            case ["end_leases"]:
                self.on_loop(self.end_leases)
            case other:
                raise ValueError(f"unknown command {other}")
        say(f"ok {line}")

    def poison(self) -> None:
        assert self.worker.control is not None
        assert self.engine is not None
        pool = self.worker.control.core.kv.pool
        blocks = range(1, self.engine.pool.tensor.shape[0])
        self.engine.pool.poison(
            [b for b in blocks if not pool.num_holds(b) and not pool.is_cached(b)]
        )

    def end_leases(self) -> None:
        assert self.worker.control is not None
        core = self.worker.control.core
        for lease in core.leases.statuses():
            core.outgoing.end_lease(lease.key, "test")  # what it would send is lost

    def on_loop(self, call: Callable[[], None]) -> None:
        done = threading.Event()
        loop = self.worker._loop
        assert loop is not None

        def run() -> None:
            call()
            done.set()

        loop.call_soon_threadsafe(run)
        if not done.wait(30):
            raise TimeoutError("the control thread did not answer")


def main() -> None:
    options = json.loads(sys.argv[1])
    options["router_addresses"] = tuple(options["router_addresses"])
    test = WorkerUnderTest(WorkerOptions(**options))
    test.start()
    for line in sys.stdin:
        test.command(line.strip())
    test.worker.stop(10)


if __name__ == "__main__":
    main()
