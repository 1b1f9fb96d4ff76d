"""One process of the transfer benchmarks: a worker without model and router.

Control, core, tables, transport, peer streams and gRPC service are the production objects; the
engine is given: a paced stand-in that writes what a reader can check, or the real one.
"""

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
from opentelemetry.trace import NoOpTracer

from benchmarks.transfer.engine import PacedEngine, number_of, words
from benchmarks.transfer.marks import MarkedEngine, Marks
from benchmarks.transfer.plan import NodePlan, hello_of
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Offers, PeerMessage
from disagg.messages.reports import TransferReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel, PartEnded, ToRouterMessage
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.core import WorkerCore
from disagg.tls.connections import Connections
from disagg.wire.stream_hello import PeerHello
from disagg.wire.v1 import worker_pb2_grpc
from disagg.workers import control as control_module
from disagg.workers.channel import CHANNEL_OPTIONS
from disagg.workers.checksums import PoolChecksums
from disagg.workers.control import Control
from disagg.workers.engines.native.paged_pool import region_of
from disagg.workers.nixl_transport import NixlTransport
from disagg.workers.peer_links import GrpcPeerLinks
from disagg.workers.request_trace import RequestTrace
from disagg.workers.service import WorkerService
from disagg.workers.transport import agent_name

WAIT_S = 120.0
WORDS_PER_PAGE = 512
"""One 64-bit word in so many is compared after a pull."""


class MarkedLinks(GrpcPeerLinks):
    """Peer streams that note when a seal leaves."""

    node: "Node"

    def send(self, peer: Incarnation, message: PeerMessage) -> None:
        """Queue a message for the peer."""
        if isinstance(message, Offers) and message.seal is not None:
            self.node.mark(message.key, "seal sent")
        super().send(peer, message)


class Node:
    """The process's objects; the methods are called from the pipe's thread."""

    def __init__(self, plan: NodePlan) -> None:
        torch.set_num_threads(1)
        control_module.IDLE_CHECK_S = 1e9  # linear in the pool, and not what is measured
        self.plan = plan
        self.incarnation = Incarnation(plan.name, f"epoch-{plan.name}")
        self.marks: defaultdict[RequestKey, Marks] = defaultdict(Marks)
        self.changed = threading.Condition()
        self.ended: dict[RequestKey, str] = {}
        self.destinations: dict[RequestKey, Sequence[Sequence[tuple[int, int]]]] = {}
        self.failed = ""
        self.reads = Marks()
        if plan.model_dir:
            from disagg.workers.engines.native.native_engine import NativeEngine

            real = NativeEngine(plan.model_dir, num_blocks=plan.num_blocks, device=plan.device)
            self.layout, self.pool = real.layout, real.pool.tensor
            self.engine = MarkedEngine(self.mark, real)
        else:
            self.layout = plan_layout(plan.layers)
            paced = PacedEngine(
                self.layout,
                plan.num_blocks,
                tokens_per_s=plan.tokens_per_s,
                writes=plan.writes,
                device=plan.device,
            )
            self.pool = paced.pool
            self.engine = MarkedEngine(self.mark, paced)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="control", daemon=True).start()
        self._on_loop(self._start())

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        plan, layout = self.plan, self.layout
        max_model_tokens = (plan.num_blocks + 1) * layout.hash_block_tokens
        step_tokens = min(plan.max_step_tokens, max_model_tokens)
        kv = KVCacheCoordinator(
            layout, plan.num_blocks, max_model_tokens=max_model_tokens, max_step_tokens=step_tokens
        )
        limits = plan.limits(layout, max_model_tokens, step_tokens)
        self.hasher = BlockHasher(b"benchmark", layout.hash_block_tokens)
        self.core = WorkerCore(self.incarnation, layout, kv, self.hasher, limits, lambda _: 5)
        self._note_destinations()

        def read_done(read_id: int, error: str) -> None:
            self.reads.add("done")
            loop.call_soon_threadsafe(self.control.read_done, read_id, error)

        self.transport = NixlTransport(
            agent_name(self.incarnation),
            region_of(self.pool),
            on_read_done=read_done,
            handle_bytes_max=plan.handle_bytes_max,
        )
        self._note_reads()
        self.control = Control(
            self.core,
            self.engine,
            self.transport,
            self._fail,
            RequestTrace(NoOpTracer()),
            checksums=self._start_checksums(loop) if plan.checksums else None,
        )
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        hello = hello_of(layout, self.address, self.transport.local_pools())
        links = MarkedLinks(
            self.incarnation,
            hello,
            on_hello=self._on_hello,
            on_message=self.control.peer_message,
            on_lost=self.control.peer_lost,
            connections=Connections(""),
        )
        links.node = self
        self._links = links
        service = WorkerService(self.incarnation, lambda: "both", self.control, links)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        self.control.start(links)
        await server.start()
        self._server = server
        self.control.open_session(self._on_worker_message)

    def _start_checksums(self, loop: asyncio.AbstractEventLoop) -> PoolChecksums:
        def known(request_id: int, checksums: Sequence[int]) -> None:
            loop.call_soon_threadsafe(self.control.checksums_known, request_id, checksums)

        return PoolChecksums(region_of(self.pool), known, self._fail)

    def _note_destinations(self) -> None:
        begin = self.core.inbound.begin

        def noted(
            now_ms: int,
            key: RequestKey,
            owner: Incarnation,
            destinations: Any,
            *more: Any,
            **named: Any,
        ) -> None:
            self.destinations[key] = destinations
            begin(now_ms, key, owner, destinations, *more, **named)

        self.core.inbound.begin = noted  # type: ignore[method-assign]

    def _note_reads(self) -> None:
        read = self.transport.read

        def noted(*arguments: Any) -> None:
            self.reads.add("posted")
            read(*arguments)

        self.transport.read = noted  # type: ignore[method-assign, assignment]

    def _on_hello(self, who: Incarnation, hello: PeerHello) -> None:
        self.transport.add_peer(agent_name(who), hello.pools)

    def _on_worker_message(self, message: ToRouterMessage) -> None:
        match message:
            case TransferReport():
                self.mark(message.key, "committed")
                self._end(message.key, "")
            case PartEnded():
                self._end(message.key, f"{message.reason}: {message.message}")

    def _end(self, key: RequestKey, error: str) -> None:
        with self.changed:
            self.ended[key] = error
            self.changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self.changed:
            self.failed = reason
            self.changed.notify_all()

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def mark(self, key: Hashable, what: str) -> None:
        """Note an event of a request."""
        assert isinstance(key, RequestKey)
        self.marks[key].add(what)

    # --- called through the pipe

    def me(self) -> PeerAddress:
        """Where the other node finds this one."""
        return PeerAddress(self.incarnation, self.address)

    def set_pipelined(self, pipelined: bool) -> None:
        """Offer after every chunk, as production does, or at the seal alone."""
        prefill_side = self.core.prefill_side
        if pipelined:
            vars(prefill_side).pop("offer", None)
        else:
            vars(prefill_side)["offer"] = lambda *_, **__: None

    def submit(
        self, number: int, role: Role, num_tokens: int, max_tokens: int, peer: PeerAddress | None
    ) -> None:
        """Start a request whose prompt is like no other's."""
        tokens, salt = tuple(range(num_tokens)), str(number).encode()
        hashes: list[bytes] = []
        self.hasher.extend(hashes, tokens, salt)
        key, sampling = RequestKey(str(number), 1), SamplingParams(max_tokens)
        message = Submit(key, role, tokens, tuple(hashes), salt, sampling, peer)

        async def hand_in() -> None:
            self.control.router_message(message)

        self._on_loop(hand_in())

    def cancel(self, number: int) -> None:
        """End a request."""

        async def hand_in() -> None:
            self.control.router_message(Cancel(RequestKey(str(number), 1), "measured"))

        self._on_loop(hand_in())

    def wait_ended(self, number: int) -> None:
        """Wait for the commit; an error if the request ended otherwise."""
        self._wait(number, lambda key: key in self.ended)

    def wait_decodable(self, number: int) -> None:
        """Wait for the first step over pulled KV."""
        self._wait(number, lambda key: "step ended" in self.marks[key].first)

    def _wait(self, number: int, holds: Callable[[RequestKey], bool]) -> None:
        key, by_s = RequestKey(str(number), 1), time.monotonic() + WAIT_S
        with self.changed:
            while not holds(key) and not self.failed and time.monotonic() < by_s:
                self.changed.wait(0.01)
        error = self.failed or self.ended.get(key, "")
        if error or not holds(key):
            raise RuntimeError(f"request {number} at {self.plan.name}: {error or 'no end'}")

    def take_marks(self, number: int) -> Marks:
        """What was noted of a request."""
        return self.marks.pop(RequestKey(str(number), 1))

    def num_wrong_blocks(self, number: int) -> tuple[int, int]:
        """Pulled blocks that do not hold what their owner wrote, and all that were pulled."""
        key = RequestKey(str(number), 1)
        wrong = total = 0
        for group, pairs in enumerate(self.destinations.pop(key)):
            total += len(pairs)
            for block_index, block in pairs:
                row = words(self.pool)[block]
                want = number_of(key, group, block_index)
                right = bool((row[::WORDS_PER_PAGE] == want).all()) and int(row[-1]) == want
                wrong += not right
        return wrong, total

    def take_reads(self) -> Marks:
        """Times of READs posted and ended since the last call."""
        reads, self.reads = self.reads, Marks()
        return reads

    def take_steps(self) -> list[tuple[float, float]]:
        """Begin and end of every step since the last call."""
        steps, self.engine.steps = self.engine.steps, []
        return steps

    def cpu_s(self) -> dict[str, float]:
        """CPU time used so far, per thread of ours; what ended is forgotten."""
        clocks = {
            thread.name.split(" ")[0]: time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.ident is not None
        }
        return {name: time.clock_gettime(clock) for name, clock in clocks.items()}

    def extra(self, make: Callable[["Node"], Any], call: str, arguments: dict[str, Any]) -> Any:
        """Call a method of a helper object that lives beside the node, made at first use."""
        helpers: dict[Any, Any] = self.__dict__.setdefault("_extras", {})
        if make not in helpers:
            helpers[make] = make(self)
        return getattr(helpers[make], call)(**arguments)

    def stop(self) -> None:
        """Close everything; the process may end then."""

        async def stop() -> None:
            await self._links.close()
            await self._server.stop(grace=None)
            await self.control.stop()

        self._on_loop(stop())
        self.transport.close(5.0)


def serve(plan: NodePlan, pipe: Connection) -> None:
    """Answer (method, arguments) with (ok, value) until the pipe ends."""
    os.dup2(2, 1)  # NIXL logs to standard output, where the figures go
    node = Node(plan)
    pipe.send((True, node.me()))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(node, method)(**arguments)
        except Exception as error:
            answer = False, f"{plan.name}.{method}: {type(error).__name__}: {error}"
        pipe.send(answer)
        if method == "stop":
            return
