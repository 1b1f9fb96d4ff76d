"""Two whole workers in one process, unequal in blocks and in ranks: their shells, gRPC and NIXL."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.reports import TransferReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import PartEnded, ToRouterMessage
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.testing.scripted_worker import HASH_KEY
from disagg.testing.simulation.symbolic_engine import expected_tokens
from disagg.wire.session_codec import session_request_to_wire, session_response_from_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import session_pb2, worker_pb2_grpc
from disagg.workers.options import WorkerOptions
from disagg.workers.worker import Worker
from tests.unit.workers.engines.digest_engine import DigestEngine

NUM_TOKENS, NUM_HEADS, HASH_TOKENS = 5, 2, 4
TIMEOUT_S = 60.0
PAIRS = [((4, 1), (8, 1)), ((8, 1), (4, 1)), ((4, 1), (4, 2)), ((8, 2), (4, 1)), ((4, 2), (8, 2))]
"""Tokens of a block and number of ranks, of the prefill and of the decode worker."""
Answer = tuple[list[int], TransferReport | None]
LENGTHS = (1, 3, 4, 5, 8, 9, 23, 70)


def worker_of(name: str, block_tokens: int, num_ranks: int) -> tuple[Worker, DigestEngine]:
    """Pools of other sizes, too."""
    engine = DigestEngine(300 + 10 * block_tokens, block_tokens, NUM_HEADS, num_ranks)
    return Worker(options_of(name), engine_factory=lambda _: engine), engine


def options_of(name: str) -> WorkerOptions:
    """Of a worker that registers nowhere."""
    return WorkerOptions(
        worker_id=name,
        role="both",
        model_dir="",
        model_name="digest",
        router_addresses=(),
        hash_block_tokens=HASH_TOKENS,
        max_step_tokens=16,
        hash_key=HASH_KEY,
    )


class Sessions:
    """A router's sessions with two workers, by hand; one request at a time."""

    def __init__(self, *workers: tuple[Worker, DigestEngine]) -> None:
        self._workers = {worker.incarnation.worker_id: worker for worker, _ in workers}
        self._engines = {worker.incarnation.worker_id: engine for worker, engine in workers}
        self._out: dict[str, asyncio.Queue[Submit]] = {}
        self._said: asyncio.Queue[tuple[str, ToRouterMessage]] = asyncio.Queue()
        self._num_requests = 0

    def block_tokens(self, name: str) -> int:
        return self._engines[name].layout.groups[0].spec.block_tokens

    def expected(self, prompt: tuple[int, ...]) -> list[int]:
        return expected_tokens(self._engines["p"].layout, prompt, NUM_TOKENS)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run(one)) for one in self._workers.values()]
            await asyncio.sleep(0)  # they have begun
            yield
            for task in tasks:
                task.cancel()

    async def _run(self, worker: Worker) -> None:
        name = worker.incarnation.worker_id
        out = self._out[name] = asyncio.Queue[Submit]()

        async def requests() -> AsyncIterator[session_pb2.SessionRequest]:
            yield session_request_to_wire(SessionOpen("router", worker.incarnation))
            while True:
                yield session_request_to_wire(await out.get())

        async with grpc.aio.insecure_channel(worker.address) as channel:
            call = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Session(requests())
            async for response in call:
                await self._said.put((name, session_response_from_wire(response)))

    async def hand_over(self, prompt: tuple[int, ...]) -> Answer:
        """Prefill on p, decode on d."""
        self._num_requests += 1
        self._submit("d", Role.DECODE, prompt, peer=self._address("p"))
        self._submit("p", Role.PREFILL, prompt, peer=self._address("d"))
        return await self._answer("d")

    async def serve(self, name: str, prompt: tuple[int, ...], pull_from: str = "") -> Answer:
        """On one worker alone, which perhaps pulls the prefix from the other one."""
        self._num_requests += 1
        plan = PullPlan(self._address(pull_from), len(prompt)) if pull_from else None
        self._submit(name, Role.LOCAL, prompt, pull=plan)
        return await self._answer(name)

    def _address(self, name: str) -> PeerAddress:
        return PeerAddress(self._workers[name].incarnation, self._workers[name].address)

    def _submit(self, name: str, role: Role, prompt: tuple[int, ...], **more: Any) -> None:
        key = RequestKey(f"r{self._num_requests}", self._num_requests)
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        self._out[name].put_nowait(Submit(key, role, prompt, (), b"", sampling, **more))

    async def _answer(self, worker: str) -> Answer:
        """Tokens that a worker says, and what it has pulled."""
        tokens: list[int] = []
        report: TransferReport | None = None
        while True:
            name, message = await self._said.get()
            assert not isinstance(message, PartEnded), message
            if name != worker:
                continue
            if isinstance(message, TransferReport):
                report = message
            elif isinstance(message, StepOutputs):
                for output in message.outputs:
                    tokens += output.token_ids
                    if output.finish_reason is not FinishReason.NONE:
                        return tokens, report


def prompt_of(length: int, salt: int = 3) -> tuple[int, ...]:
    return tuple((7 * n + salt) % 89 for n in range(length))


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def workers(request: pytest.FixtureRequest) -> Iterator[list[tuple[Worker, DigestEngine]]]:
    shapes = zip(("p", "d"), request.param, strict=True)
    made = [worker_of(name, *shape) for name, shape in shapes]
    for worker, _ in made:
        worker.start()
    try:
        yield made
    finally:
        for worker, _ in made:
            assert worker.stop()
            assert worker.failed == ""


@pytest.fixture
def sessions(workers: list[tuple[Worker, DigestEngine]]) -> Sessions:
    return Sessions(*workers)


def test_what_is_handed_over_is_exact(sessions: Sessions) -> None:
    """Shorter and longer than blocks and windows; then again, with hits on both sides."""

    async def run() -> None:
        async with sessions.opened():
            for length in (*LENGTHS, *LENGTHS):
                tokens, report = await sessions.hand_over(prompt_of(length))
                assert tokens == sessions.expected(prompt_of(length))
                assert report is not None
                assert report.groups[1].pulled_blocks > 0
        assert report is not None
        # The last one is repeated: of full attention whole blocks are there already.
        size = sessions.block_tokens("d")
        assert report.groups[0].block_map.count("h") == LENGTHS[-1] // size
        assert report.groups[0].pulled_blocks == -(-LENGTHS[-1] // size) - LENGTHS[-1] // size

    asyncio.run(run())


@pytest.mark.parametrize(("reader", "owner"), [("p", "d"), ("d", "p")])
def test_a_prefix_is_pulled_up_to_a_block_end_of_both(
    sessions: Sessions, reader: str, owner: str
) -> None:
    async def run() -> None:
        async with sessions.opened():
            prompt = prompt_of(61, salt=5 + ord(reader))
            tokens, report = await sessions.serve(owner, prompt)
            assert (tokens, report) == (sessions.expected(prompt), None)
            longer = (*prompt, 6, 7)
            tokens, report = await sessions.serve(reader, longer, pull_from=owner)
            assert tokens == sessions.expected(longer)
            assert report is not None
            assert not report.failed
            boundary = max(sessions.block_tokens(name) for name in (reader, owner))
            assert report.num_tokens == 61 // boundary * boundary
            assert min(group.pulled_blocks for group in report.groups) > 0

    asyncio.run(run())
