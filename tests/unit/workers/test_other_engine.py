"""A worker runs whatever engine it is given: nothing of it but the protocol is asked for."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.kv.sequence import KVSequence
from disagg.scheduling.step import Step, StepResult
from disagg.testing.scripted_worker import HASH_KEY
from disagg.testing.simulation.symbolic_engine import expected_tokens
from disagg.workers.engines.protocol import Drafts, EngineFailedError
from disagg.workers.options import WorkerOptions
from disagg.workers.worker import Worker
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.lone_worker import NoTransport, ask

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
NUM_TOKENS = 7
TIMEOUT_S = 60.0


async def answer_of(worker: Worker) -> list[int]:
    [answer] = await ask(worker, [PROMPT], NUM_TOKENS)
    return answer.token_ids


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
        worker_id="w",
        role="both",
        model_dir="",
        model_name="digest",
        router_addresses=(),
        hash_key=HASH_KEY,
    )
    return Worker(
        options,
        engine_factory=lambda _: engine,
        transport_factory=lambda *_: cast(Any, NoTransport()),
    )


class DraftingEngine(DigestEngine):
    """It computes drafts, and says that a group has layers that draft."""

    drafts = Drafts(num_tokens=3, eagle_groups=frozenset({1}))


def test_an_engine_that_drafts_has_slots_for_it_and_shorter_hits() -> None:
    hits, slots = [], []
    for engine in (DigestEngine(64), DraftingEngine(64)):
        worker = worker_over(engine)
        worker.start()
        try:
            assert asyncio.run(answer_of(worker)) == expected_tokens(
                engine.layout, PROMPT, NUM_TOKENS
            )
            assert worker.control is not None
            kv = worker.control.core.kv
            asked = KVSequence("asked", [*PROMPT, *range(100, 105)])
            BlockHasher(block_hash_key(HASH_KEY, engine.fingerprint), 4).extend(
                asked.hashes, asked.token_ids
            )
            hits.append(kv.find_longest_cache_hit(asked, asked.num_tokens - 1).num_tokens)
            slots.append(kv.slots.total(10))
        finally:
            assert worker.stop()
    assert slots == [10, 13]
    assert hits == [8, 4]


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
