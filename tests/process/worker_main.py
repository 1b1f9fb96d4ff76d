"""A real worker process whose test can hold it at a point, corrupt it, or make it forget.

Commands on standard input, one a line; every answer and event is a line on standard output:

    hold POINT                  from now on nothing passes it (steps, reads, dones, or checks of
                                the own transport); "held POINT" when one waits
    pass POINT                  let everything go on
    pass POINT N                let N more pass and hold what follows
    corrupt GROUP               overwrite one block of that group after each READ
    unwritten GROUP             poison it instead, as if the READ had left it out
    fail GROUP POSITION         poison that block and let its READ end with an error
    intact                      none of these any more
    poison                      fill every block that is free and not cached with NaN
    forget                      empty the prefix cache
    narrow TOKENS               from now on compute every window as so many tokens too small
    take LEAVE                  hold all free blocks but so many
    give                        hold none of them any more
    break posts|mend posts      from now on NIXL raises at every READ that is posted, or no longer
    break engine                vLLM's runner raises at the next step
    end_leases                  end all leases without telling the reader
    counts                      "counts JSON": what has reached this worker so far, and how many
                                sequences vLLM's runner holds
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from disagg.errors import RemoteFault
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.messages.session import ToWorkerMessage
from disagg.telemetry.garbage_collector import spare_garbage_collector
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.protocol import Engine
from disagg.workers.engines.vllm.vllm_engine import VllmEngine
from disagg.workers.nixl_agent import ReadHandle
from disagg.workers.nixl_transport import NixlTransport
from disagg.workers.options import WorkerOptions
from disagg.workers.pool_region import PoolRegion
from disagg.workers.transport import KVTransport
from disagg.workers.transport_choice import nixl_transport
from disagg.workers.worker import Worker
from tests.process.gates import Gate, GatedTransport, HeldEngine, say

TAKER = "taken by a test"


class WorkerUnderTest:
    def __init__(self, options: WorkerOptions) -> None:
        self.gates = {name: Gate(name) for name in ("steps", "reads", "dones", "checks")}
        self.corrupt: set[int] = set()
        self.unwritten: set[int] = set()
        self.to_fail: set[tuple[int, int]] = set()
        self.group_of: dict[int, int] = {}
        self.place_of: dict[int, tuple[int, int]] = {}
        self.engine: NativeEngine | VllmEngine | None = None
        self.reads: dict[int, Sequence[int]] = {}
        self.num_router_messages = 0
        self.posts_broken = False
        self.worker = Worker(options, transport_factory=self.make_transport)

    def make_transport(
        self,
        agent: str,
        engine: Engine,
        on_read_done: Callable[[int, str], None],
        handle_bytes_max: int,
    ) -> KVTransport:
        assert isinstance(engine, NativeEngine | VllmEngine)
        self.engine = engine

        def done(read_id: int, error: str) -> None:
            error = error or self.fail(read_id)
            self.spoil(read_id)
            self.gates["dones"].go(lambda: on_read_done(read_id, error))

        inner = nixl_transport(agent, engine, done, handle_bytes_max)
        if isinstance(inner, NixlTransport):  # one rank: its agent is in this process
            self.really_post = inner._agent.post
            inner._agent.post = self.post  # type: ignore[method-assign]
        return GatedTransport(inner, self.gates["reads"], self.gates["checks"], self.remember)

    def remember(self, read_id: int, dst_blocks: Sequence[int]) -> None:
        """Which group each destination serves; called on the control thread."""
        self.reads[read_id] = dst_blocks
        assert self.worker.control is not None
        core = self.worker.control.core
        reservations = [pull.reservation for pull in core.decode_side.pulls.values()]
        reservations += [pull.reservation for pull in core.prefix_pull.pulls.values()]
        for reservation in reservations:
            for group, lacks in enumerate(reservation.lacks):
                self.group_of.update({block: group for _, block in lacks})
                self.place_of.update({block: (group, place) for place, block in lacks})

    def fail(self, read_id: int) -> str:
        """The error of a READ that carries a block which must not arrive, or ""."""
        assert self.engine is not None
        lost = [b for b in self.reads[read_id] if self.place_of.get(b) in self.to_fail]
        if lost:
            self.fill_with_nan(lost)
            say(f"failed {self.place_of[lost[0]]}")
        return "failed by the test" if lost else ""

    def spoil(self, read_id: int) -> None:
        """Overwrite the first block of a group to be corrupted: one block is enough."""
        assert self.engine is not None
        left = self.corrupt | self.unwritten
        for block in self.reads.pop(read_id):
            group = self.group_of.get(block, -1)
            if group in left:
                left.discard(group)
                if group in self.unwritten:
                    self.fill_with_nan([block])
                else:
                    dtype = getattr(torch, self.engine.dtype)
                    self.pool[block].view(dtype).mul_(-3).add_(0.5)
                say(f"corrupted {group} {block}")

    def start(self) -> None:
        self.worker.start()
        control = self.worker.control
        assert control is not None
        assert self.engine is not None
        self.held_engine = HeldEngine(self.engine, self.gates["steps"])
        control._engine.engine = self.held_engine
        router_message = control.router_message

        def counted(message: ToWorkerMessage) -> None:
            self.num_router_messages += 1
            router_message(message)

        control.router_message = counted  # type: ignore[method-assign]
        incarnation = self.worker.incarnation
        say("serving " + json.dumps({"address": self.worker.address, "epoch": incarnation.epoch}))

    def end_when_failed(self) -> None:
        """Like every real worker's process; `stop` also wakes this, after standard input ended."""
        self.worker.wait_failed()
        if self.worker.failed:
            os._exit(1)

    def command(self, line: str) -> None:
        match line.split():
            case ["hold", name]:
                self.gates[name].close()
            case ["pass", name]:
                self.gates[name].open()
            case ["pass", name, passes]:
                self.gates[name].open(int(passes))
            case ["corrupt", group]:
                self.corrupt.add(int(group))
            case ["unwritten", group]:
                self.unwritten.add(int(group))
            case ["fail", group, position]:
                self.to_fail.add((int(group), int(position)))
            case ["intact"]:
                self.to_fail.clear()
                self.corrupt.clear()
                self.unwritten.clear()
            case ["poison"]:
                self.on_loop(self.poison)
            case ["forget"]:
                self.on_loop(self.forget)
            case ["narrow", tokens]:
                self.on_loop(lambda: self.narrow(int(tokens)))
            case ["take", leave]:
                self.on_loop(lambda: self.take(int(leave)))
            case ["give"]:
                self.on_loop(self.give)
            case ["break" | "mend" as what, "posts"]:
                self.posts_broken = what == "break"
            case ["break", "engine"]:
                self.break_engine()
            case ["role", role]:
                self.worker.role = role
            case ["end_leases"]:
                self.on_loop(self.end_leases)
            case ["counts"]:
                self.on_loop(self.tell_counts)
            case other:
                raise ValueError(f"unknown command {other}")
        say(f"ok {line}")

    def poison(self) -> None:
        assert self.worker.control is not None
        assert self.engine is not None
        pool = self.worker.control.core.kv.pool
        blocks = range(1, self.pool.shape[0])
        self.fill_with_nan(b for b in blocks if not pool.num_holds(b) and not pool.cache.has(b))

    @property
    def pool(self) -> torch.Tensor:
        """The KV memory, int8 [num_blocks, block_bytes]."""
        assert self.engine is not None
        pool = self.engine.pool
        return pool if isinstance(pool, torch.Tensor) else pool.tensor

    def fill_with_nan(self, blocks: Iterable[int]) -> None:
        self.pool[list(blocks)] = -1

    def forget(self) -> None:
        assert self.worker.control is not None
        self.worker.control.core.kv.pool.clear_cache()

    def narrow(self, tokens: int) -> None:
        """0 restores what the checkpoint says."""
        assert self.worker.control is not None
        assert self.engine is not None
        managers = self.worker.control.core.kv.managers
        for manager, group in zip(managers, self.engine.layout.groups, strict=True):
            if isinstance(group.spec, SlidingWindowSpec):
                manager.spec = replace(group.spec, window_tokens=group.spec.window_tokens - tokens)

    def take(self, leave: int) -> None:
        """What a leak would do, or other requests; at most once before `give`."""
        assert self.worker.control is not None
        kv = self.worker.control.core.kv
        pool = kv.pool
        taken = pool.allocate(max(0, kv.num_available_blocks - leave))
        pool.hold(TAKER, taken)
        pool.release(taken)

    def give(self) -> None:
        assert self.worker.control is not None
        pool = self.worker.control.core.kv.pool
        if TAKER in pool.holders():
            pool.drop(TAKER)

    def post(self, handle: ReadHandle) -> bool:
        if self.posts_broken:
            raise RemoteFault("posting a READ: broken by a test")
        return self.really_post(handle)

    def break_engine(self) -> None:
        assert isinstance(self.engine, VllmEngine)

        def execute_model(_: object) -> None:
            raise IndexError("broken by a test")

        self.engine.runner._worker.execute_model = execute_model

    def tell_counts(self) -> None:
        counts = {"messages": self.num_router_messages, "steps": self.held_engine.num_steps}
        if isinstance(self.engine, VllmEngine) and isinstance(self.engine.region, PoolRegion):
            counts["sequences"] = self.engine.runner.num_requests
        say("counts " + json.dumps(counts))

    def end_leases(self) -> None:
        assert self.worker.control is not None
        core = self.worker.control.core
        for lease in core.leases.statuses():  # what it would send is lost
            core.leases.end(lease.lease_id, "test")
            core.prefill_side.end_lease(lease.key, "test")
        core._out.take()

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


def main(kind: type[WorkerUnderTest] = WorkerUnderTest) -> None:
    options = json.loads(sys.argv[1])
    options["router_addresses"] = tuple(options["router_addresses"])
    test = kind(WorkerOptions(**options))
    test.start()
    spare_garbage_collector()  # as a worker that is not a test's
    threading.Thread(target=test.end_when_failed, daemon=True).start()
    for line in sys.stdin:
        test.command(line.strip())
    test.worker.stop(10)
    # The interpreter's own end takes seconds once torch and UCX are loaded.
    os._exit(0)


if __name__ == "__main__":
    main()
