"""The scripted worker of `disagg.testing` behind the Worker service."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksStored, KVEventBatch, KVSnapshot
from disagg.messages.outputs import StepOutputs
from disagg.messages.registration import DEFAULT_REVISION, Contract, WorkerInfo
from disagg.messages.session import (
    Cancel,
    Claim,
    PrefixCacheReset,
    ResetPrefixCache,
    Superseded,
    ToWorkerMessage,
    WorkerIdClaimed,
)
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Submit
from disagg.scheduling.claims import Claims, same_request
from disagg.testing import scripted_worker
from disagg.testing.scripted_worker import BLOCK_TOKENS, CONTRACT, READY
from disagg.wire.kv_events_codec import kv_batch_to_wire
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.session_batches import unbatched
from disagg.wire.session_codec import session_request_from_wire, session_response_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import worker_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from disagg.wire.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

BOUND_S = 60
"""A state not seen by then fails its test; a slow and loaded machine takes seconds."""


class ScriptedWorker(WorkerServicer):
    """Token at absolute position p is ``token(p)``; every received message is kept.

    Args:
        gate: when given, each step waits for it: tests release tokens one by one.
        hit_tokens: what it reports as found in its cache.
    """

    def __init__(
        self,
        worker_id: str,
        token: Callable[[int], int],
        *,
        epoch: str = "e1",
        gate: asyncio.Semaphore | None = None,
        hit_tokens: int = 0,
        tokens_per_step: int = 1,
        contract: Contract = CONTRACT,
        max_model_tokens: int = 512,
        role: str = "both",
        revision: str = DEFAULT_REVISION,
        tokenizer_digest: str = "",
        stats: WorkerStats = READY,
        takes_batches: bool = False,
    ) -> None:
        self.incarnation = Incarnation(worker_id, epoch)
        self.script = scripted_worker.ScriptedWorker(
            self.incarnation,
            token,
            role=role,
            hit_tokens=hit_tokens,
            tokens_per_step=tokens_per_step,
            contract=contract,
            max_model_tokens=max_model_tokens,
            revision=revision,
            tokenizer_digest=tokenizer_digest,
        )
        self.gate = gate
        self.takes_batches = takes_batches
        self.num_read = 0
        self.stats = stats
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.opened: list[SessionOpen] = []
        self.resets: list[int] = []
        self.claims: list[WorkerIdClaimed] = []
        self.reset_answer: PrefixCacheReset | None = PrefixCacheReset(0, 3)
        self.num_sent = 0
        self.status: worker_pb2.StatusResponse | None = None
        self.status_gate: asyncio.Event | None = None
        self.refusal = ""  # of sessions
        self.num_sessions = 0
        self.num_asked = 0
        self.kv_batches: list[KVEventBatch | KVSnapshot] = []
        self.kv_asked: list[int] = []
        self.kv_first = 0  # new event streams begin with this batch
        self.misbehave: Callable[[Submit], list[Any] | None] | None = None
        self.token_of: Callable[[Submit], Callable[[int], int]] | None = None
        """Tokens that are not the same for all requests."""
        self.changed = asyncio.Condition()
        self._sessions: set[asyncio.Queue[Any]] = set()
        self._routers: dict[str, asyncio.Queue[Any]] = {}
        self._names = Claims()
        self._parts: dict[Any, Any] = {}
        self._server: Any = None

    async def start(self) -> "ScriptedWorker":
        self._server = grpc.aio.server()
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        add_WorkerServicer_to_server(self, self._server)
        await self._server.start()
        return self

    async def stop(self) -> None:
        for task in self._parts.values():
            task.cancel()
        await self._server.stop(grace=0)

    @property
    def info(self) -> WorkerInfo:
        info = replace(self.script, address=f"127.0.0.1:{self.port}").info
        return replace(info, takes_batches=self.takes_batches)

    async def register(self, router_port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router_port}") as channel:
            stub: Any = RouterStub(channel)
            await stub.Register(worker_info_to_wire(self.info))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something this worker received or did; at most `BOUND_S`."""
        try:
            async with asyncio.timeout(BOUND_S), self.changed:
                await self.changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(
                f"not seen: {what}; submits {self.submits}, cancels {self.cancels}"
            ) from None

    # --- the service

    async def Session(self, request_iterator, context):
        outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._sessions.add(outgoing)
        reader = asyncio.create_task(self._read(request_iterator, outgoing))
        try:
            await context.send_initial_metadata(())
            self.num_sessions += 1
            if self.refusal:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.refusal)
            yield session_response_to_wire(self.stats)
            while True:
                message = await outgoing.get()
                if message is None:
                    return
                yield session_response_to_wire(message)
        finally:
            reader.cancel()
            self._sessions.discard(outgoing)

    async def KvEvents(self, request, context):
        self.kv_asked.append(request.from_sequence)
        await self._notify()
        sent = self.kv_first
        while True:
            for batch in self.kv_batches[sent:]:
                yield kv_batch_to_wire(self.incarnation.epoch, batch)
                sent += 1
            async with self.changed:
                await self.changed.wait_for(lambda: len(self.kv_batches) > sent)  # noqa: B023

    async def Peer(self, request_iterator, context):  # type: ignore[override]
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    async def Status(self, request, context):
        self.num_asked += 1
        await self._notify()
        if self.status_gate is not None:
            await self.status_gate.wait()
        if self.status is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")
        return self.status

    async def publish(self, *batches: KVEventBatch | KVSnapshot) -> None:
        self.kv_batches += batches
        await self._notify()

    async def end_sessions(self) -> None:
        """Close every session from this side, as a worker that restarts would."""
        for outgoing in self._sessions:
            outgoing.put_nowait(None)

    async def _read(self, request_iterator, outgoing) -> None:
        router = ""
        async for request in request_iterator:
            self.num_read += 1
            for one in unbatched(request):
                message = session_request_from_wire(one, router)
                if isinstance(message, SessionOpen):
                    self.opened.append(message)
                    router = message.router_id
                    self._routers[router] = outgoing
                else:
                    self._take(message, outgoing)
            await self._notify()

    def _take(self, message: ToWorkerMessage, outgoing: "asyncio.Queue[Any]") -> None:
        match message:
            case Claim():
                self._claim(message)
            case Submit():
                self.submits.append(message)
                self._parts[message.key] = asyncio.create_task(self._serve(message, outgoing))
            case ResetPrefixCache(number):
                self.resets.append(number)
                if self.reset_answer is not None:
                    outgoing.put_nowait(replace(self.reset_answer, number=number))
            case WorkerIdClaimed():
                self.claims.append(message)
            case Cancel():
                self.cancels.append(message)
                part = self._parts.pop(message.key, None)
                if part is not None:
                    part.cancel()

    def _claim(self, claim: Claim) -> None:
        superseded = self._names.take(int(time.monotonic() * 1000), claim)
        if superseded is None:
            return
        for key in [key for key in self._parts if same_request(key, superseded)]:
            self._parts.pop(key).cancel()
        self._routers[superseded.router].put_nowait(Superseded(superseded))

    async def _serve(self, submit: Submit, outgoing) -> None:
        scripted = self.misbehave(submit) if self.misbehave else None
        if scripted is not None:
            for message in scripted:
                outgoing.put_nowait(message)
            return
        script = self.script
        if self.token_of is not None:
            script = replace(script, token=self.token_of(submit))
        for message in script.answers(submit):
            if isinstance(message, StepOutputs) and self.gate is not None:
                await self.gate.acquire()
            outgoing.put_nowait(message)
            if isinstance(message, StepOutputs):
                self.num_sent += sum(len(one.token_ids) for one in message.outputs)
                await self._notify()
                await asyncio.sleep(0)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def stored(hashes, first_sequence=0) -> KVEventBatch:
    event = BlocksStored(0, tuple(hashes), None, 0, BLOCK_TOKENS)
    return KVEventBatch(first_sequence, (event,))
