"""A worker runs whatever engine it is given: nothing of it but the protocol is asked for."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Role, Submit
from disagg.scheduling.step import Step, StepResult
from disagg.testing.simulation.symbolic_engine import expected_tokens
from disagg.wire.session_codec import session_request_to_wire, session_response_from_wire
from disagg.wire.stream_hello import PoolInfo, SessionOpen
from disagg.wire.v1 import session_pb2, worker_pb2_grpc
from disagg.workers.engines.protocol import EngineFailedError
from disagg.workers.options import WorkerOptions
from disagg.workers.worker import Worker
from tests.unit.workers.engines.digest_engine import DigestEngine

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
NUM_TOKENS = 7
TIMEOUT_S = 60.0


class NoTransport:
    """Nothing is transferred here."""

    failure = ""

    def local_pools(self) -> tuple[PoolInfo, ...]:
        return (PoolInfo(b"", 0, 2, 1, "DRAM", 0),)

    def close(self, timeout_s: float) -> bool:
        return True


async def answer_of(worker: Worker) -> list[int]:
    submit = Submit(
        RequestKey("r", 1), Role.LOCAL, PROMPT, (), b"", SamplingParams(max_tokens=NUM_TOKENS)
    )

    async def requests() -> AsyncIterator[session_pb2.SessionRequest]:
        yield session_request_to_wire(SessionOpen("router", worker.incarnation))
        yield session_request_to_wire(submit)
        await asyncio.Event().wait()

    tokens: list[int] = []
    async with (
        asyncio.timeout(TIMEOUT_S),
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        call = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Session(requests())
        async for response in call:
            message = session_response_from_wire(response)
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    tokens += output.token_ids
                    if output.finish_reason is not FinishReason.NONE:
                        call.cancel()
                        return tokens
    raise AssertionError("the session ended before the request")


class FailedEngine(DigestEngine):
    """It computes one step and then no other."""

    num_steps = 0

    def run(self, step: Step) -> StepResult:
        self.num_steps += 1
        if self.num_steps > 1:
            raise EngineFailedError("the device is gone")
        return super().run(step)


def worker_over(engine: DigestEngine) -> Worker:
    options = WorkerOptions(
        worker_id="w", role="both", model_dir="", model_name="digest", router_addresses=()
    )
    return Worker(
        options,
        engine_factory=lambda _: engine,
        transport_factory=lambda *_: cast(Any, NoTransport()),
    )


def test_an_engine_that_failed_ends_the_worker() -> None:
    """A step that fails does not, see the contract; this is what cannot be gone on from."""
    engine = FailedEngine(64)
    worker = worker_over(engine)
    worker.start()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asyncio.run, answer_of(worker))
        assert worker.wait_failed(TIMEOUT_S)
        assert worker.stop()
        assert answer.exception() is not None  # its session ended before
    assert worker.failed == "the device is gone"
    assert engine.num_steps <= 3  # one more may have been launched before that was known


def test_a_worker_over_another_engine() -> None:
    engine = DigestEngine(64)
    worker = worker_over(engine)
    worker.start()
    try:
        assert worker.control is not None
        assert worker.control.core.kv.pool.num_blocks == 64
        tokens = asyncio.run(answer_of(worker))
    finally:
        assert worker.stop()
    assert tokens == expected_tokens(engine.layout, PROMPT, NUM_TOKENS)
    assert worker.failed == ""
