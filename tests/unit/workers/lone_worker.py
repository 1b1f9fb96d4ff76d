"""A worker that exchanges nothing with others, asked over a session as a router asks it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.wire.session_codec import session_request_to_wire, session_response_from_wire
from disagg.wire.stream_hello import PoolInfo, SessionOpen
from disagg.wire.v1 import session_pb2, worker_pb2_grpc
from disagg.workers.worker import Worker

TIMEOUT_S = 60.0


class NoTransport:
    """Nothing is transferred here."""

    failure = ""
    num_reads = num_in_progress = oldest_in_progress_ms = 0

    def local_pools(self) -> tuple[PoolInfo, ...]:
        return (PoolInfo(b"", 0, 2, 1, "DRAM", 0),)

    def close(self, timeout_s: float) -> bool:
        return True


@dataclass(slots=True)
class Answer:
    """What a prompt got; ``found_tokens`` of it were not computed."""

    token_ids: list[int] = field(default_factory=list)
    found_tokens: int = 0
    first_token_s: float = 0.0
    """From the submission."""


async def _at_once(worker: Worker) -> None:
    """Nothing has to happen between two prompts."""


async def until_written(worker: Worker) -> None:
    """Wait until tiers copy nothing out any more: only they hold blocks now."""
    control, loop = worker.control, worker._loop
    assert control is not None
    assert loop is not None
    kv = control.core.kv

    async def all_free() -> bool:
        return kv.num_free_blocks == kv.num_usable_blocks

    while not await asyncio.wrap_future(  # noqa: ASYNC110
        asyncio.run_coroutine_threadsafe(all_free(), loop)
    ):
        await asyncio.sleep(0.01)  # a state of another thread; the caller bounds it


async def ask(
    worker: Worker,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = 1,
    *,
    settle: Callable[[Worker], Awaitable[None]] = _at_once,
    timeout_s: float = TIMEOUT_S,
) -> list[Answer]:
    """Ask a worker one prompt after the other; ``settle`` is awaited after each answer."""
    over: asyncio.Queue[None] = asyncio.Queue()
    begun_s = 0.0

    async def requests() -> AsyncIterator[session_pb2.SessionRequest]:
        nonlocal begun_s
        yield session_request_to_wire(SessionOpen("router", worker.incarnation))
        for number, prompt in enumerate(prompts):
            key = RequestKey(f"{worker.incarnation.epoch}-{number}", 1)
            sampling = SamplingParams(max_tokens=num_tokens)
            begun_s = time.perf_counter()
            submit = Submit(key, Role.LOCAL, tuple(prompt), (), b"", sampling)
            yield session_request_to_wire(submit)
            await over.get()
            await settle(worker)
        await asyncio.Event().wait()

    answers: list[Answer] = []
    answer = Answer()
    async with (
        asyncio.timeout(timeout_s),
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        call = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Session(requests())
        async for response in call:
            message = session_response_from_wire(response)
            if isinstance(message, PrefillReport):
                answer.found_tokens = message.hit_tokens
            outputs = message.outputs if isinstance(message, StepOutputs) else ()
            for output in outputs:
                answer.first_token_s = answer.first_token_s or time.perf_counter() - begun_s
                answer.token_ids += output.token_ids
                if output.finish_reason is not FinishReason.NONE:
                    answers.append(answer)
                    answer = Answer()
                    over.put_nowait(None)
            if len(answers) == len(prompts):
                call.cancel()
                await settle(worker)
                return answers
    raise AssertionError("the session ended before the requests")
