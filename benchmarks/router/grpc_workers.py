"""A prefill and a decode worker without an engine: ``python -m benchmarks.router.grpc_workers``.

The prefill worker answers at once, the decode worker one token per stream and step, all streams of
a step in one message, as real ones do. Its argument: JSON with the router's address and the step.
"""

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import grpc

from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.messages.identity import Incarnation
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, TransferReport
from disagg.messages.session import Cancel, receipt_of
from disagg.messages.submit import Role, Submit
from disagg.testing.scripted_worker import CONTRACT, HASH_KEY, READY, ScriptedWorker
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.session_batches import MESSAGES_MAX, batched, take, unbatched
from disagg.wire.session_codec import session_request_from_wire, session_response_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1.router_pb2_grpc import RouterStub
from disagg.wire.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from disagg.workers.channel import CHANNEL_OPTIONS

BLOCK_TOKENS = 16
MAX_MODEL_TOKENS = 131_072
TOKEN = 300
"""The one that every stream says."""


class InstantWorker(WorkerServicer):
    """One worker, for any number of routers.

    Args:
        role: ``prefill`` or ``decode``.
        step_s: between tokens; 0: all tokens of a request come at once.
    """

    def __init__(self, role: str, step_s: float) -> None:
        hasher = BlockHasher(block_hash_key(HASH_KEY, "fingerprint"), BLOCK_TOKENS)
        self.script = ScriptedWorker(
            Incarnation(role, "e1"),
            lambda position: TOKEN,
            role=role,
            contract=replace(CONTRACT, hash_block_tokens=BLOCK_TOKENS, hash_scheme=hasher.scheme),
            max_model_tokens=MAX_MODEL_TOKENS,
        )
        self._step_s = step_s

    async def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]
        """Answer submits."""
        session = InstantSession(self._step_s)
        tasks = [asyncio.create_task(session.read(request_iterator))]
        if self._step_s:
            tasks.append(asyncio.create_task(session.step()))
        try:
            await context.send_initial_metadata(())
            yield session_response_to_wire(replace(READY, num_blocks_free=100_000))
            while True:
                taken = await take(session.out, MESSAGES_MAX)
                for response in batched(map(session_response_to_wire, taken)):
                    yield response
        finally:
            for task in tasks:
                task.cancel()

    async def KvEvents(self, request, context):  # type: ignore[no-untyped-def]
        """There are none."""
        await asyncio.Event().wait()
        yield

    async def Peer(self, request_iterator, context):  # type: ignore[no-untyped-def, override]
        """Nothing is handed over really."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an instant worker")

    async def Status(self, request, context):  # type: ignore[no-untyped-def]
        """Nobody looks."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an instant worker")


class InstantSession:
    """What one router has asked for.

    Attributes:
        out: what it is to be told.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.out: asyncio.Queue[Any] = asyncio.Queue()
        self._live: dict[Any, list[int]] = {}

    async def read(self, request_iterator: Any) -> None:
        """Begin what comes, until the router has gone."""
        router = ""
        async for request in request_iterator:
            for one in unbatched(request):
                match session_request_from_wire(one, router):
                    case SessionOpen() as opening:
                        router = opening.router_id
                    case Submit() as submit:
                        self._begin(submit)
                    case Cancel(key):
                        self._live.pop(key, None)

    def _begin(self, submit: Submit) -> None:
        key, num = submit.key, len(submit.token_ids)
        self.out.put_nowait(receipt_of(submit))
        if submit.role is not Role.DECODE:
            self.out.put_nowait(PrefillReport(key, num, 0, num))
            first = SequenceOutput(key, num, (TOKEN,), (), FinishReason.NONE)
            self.out.put_nowait(StepOutputs((first,)))
            return
        self.out.put_nowait(TransferReport(key, Incarnation("prefill", "e1"), (), 1, 1, 1))
        if self._step_s:
            self._live[key] = [num, num + submit.sampling.max_tokens]
            return
        tokens = (TOKEN,) * submit.sampling.max_tokens
        self.out.put_nowait(
            StepOutputs((SequenceOutput(key, num, tokens, (), FinishReason.LENGTH),))
        )

    async def step(self) -> None:
        """A token for every stream at every step, for ever."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            at_s += self._step_s
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            rows = []
            for key, (position, end) in list(self._live.items()):
                last = position + 1 == end
                reason = FinishReason.LENGTH if last else FinishReason.NONE
                rows.append(SequenceOutput(key, position, (TOKEN,), (), reason))
                self._live[key][0] += 1
                if last:
                    del self._live[key]
            if rows:
                self.out.put_nowait(StepOutputs(tuple(rows)))


def info_of(worker: InstantWorker, address: str) -> WorkerInfo:
    """A worker's registration."""
    info = replace(worker.script, address=address).info
    groups = tuple(replace(group, block_tokens=BLOCK_TOKENS) for group in info.groups)
    return replace(info, groups=groups, takes_batches=True)


async def keep_registered(info: WorkerInfo, router_address: str) -> None:
    """A heartbeat a second: a router of several processes tells all of them of each."""
    async with grpc.aio.insecure_channel(router_address) as channel:
        stub: Any = RouterStub(channel)
        while True:
            await stub.Register(worker_info_to_wire(info), wait_for_ready=True, timeout=60)
            await asyncio.sleep(1)


async def main(router_address: str, step_s: float) -> None:
    """Serve until the process is ended."""
    servers, registering = [], []
    for role in ("prefill", "decode"):
        worker = InstantWorker(role, step_s)
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        add_WorkerServicer_to_server(worker, server)
        await server.start()
        servers.append(server)
        info = info_of(worker, f"127.0.0.1:{port}")
        registering.append(keep_registered(info, router_address))
    await asyncio.gather(*registering, *(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given["router"], given["step_s"]))
