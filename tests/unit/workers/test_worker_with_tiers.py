"""A whole worker with real tiers: bytes go out of its pool, and come back into it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from disagg.errors import ConfigError
from disagg.scheduling.step import Step, StepResult
from disagg.testing.scripted_worker import HASH_KEY
from disagg.testing.simulation.symbolic_engine import expected_tokens
from disagg.workers.options import WorkerOptions
from disagg.workers.worker import Worker
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.lone_worker import TIMEOUT_S, NoTransport, ask, until_written
from tests.unit.workers.tiers.stored_blocks import files_in

NUM_BLOCKS = 40
NUM_TOKENS = 3
FIRST, SECOND = (tuple((7 * i + n) % 997 for i in range(75)) for n in (1, 2))


class PatientEngine(DigestEngine):
    """Begins a step only when tiers have written all that they were given.

    Of what is written ahead of its eviction a fast engine is given memory before it is written.
    """

    worker: Worker

    def run(self, step: Step) -> StepResult:
        until_copied(self.worker)
        return super().run(step)


def until_copied(worker: Worker) -> None:
    """Wait, on a thread of the engine's, until no write to a tier is under way."""
    control, loop = worker.control, worker._loop
    assert control is not None
    assert loop is not None
    copies = control.core.tiers.copies

    async def num_blocks() -> int:
        return sum(map(copies.num_blocks, range(len(control.core.tiers.infos))))

    while asyncio.run_coroutine_threadsafe(num_blocks(), loop).result(TIMEOUT_S):
        time.sleep(0.001)  # a state of another thread; the caller of the worker bounds it


def worker_with(
    *tiers: str, num_ranks: int = 1, engine: type[DigestEngine] = DigestEngine
) -> Worker:
    options = WorkerOptions(
        worker_id="w",
        role="both",
        model_dir="",
        model_name="digest",
        router_addresses=(),
        max_step_tokens=16,
        hash_key=HASH_KEY,
    )
    return Worker(
        replace(options, tiers=tiers),
        engine_factory=lambda _: engine(NUM_BLOCKS, num_heads=num_ranks, num_ranks=num_ranks),
        transport_factory=lambda *_: cast(Any, NoTransport()),
    )


async def serve(
    worker: Worker, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
) -> list[tuple[list[int], int]]:
    """Ask one after the other; of each the answer, and how many tokens were found."""
    # Until all is written: or the next prompt evicts what waits for it.
    answers = await ask(worker, prompts, num_tokens, settle=until_written)
    return [(answer.token_ids, answer.found_tokens) for answer in answers]


def play(worker: Worker, *prompts: tuple[int, ...]) -> list[int]:
    """How many tokens of each prompt were found; the answers are right."""
    worker.start()
    try:
        answers = asyncio.run(serve(worker, list(prompts)))
    finally:
        assert worker.stop()
    assert worker.failed == ""
    layout = DigestEngine(2).layout
    expected = [expected_tokens(layout, prompt, NUM_TOKENS) for prompt in prompts]
    assert [tokens for tokens, _ in answers] == expected
    return [found for _, found in answers]


def test_without_a_tier_what_was_evicted_is_computed_again() -> None:
    assert play(worker_with(), FIRST, SECOND, FIRST) == [0, 0, 0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("write", ["publish", "eviction"])
def test_what_was_evicted_comes_back_from_a_tier(write: str, num_ranks: int) -> None:
    worker = worker_with(f"host?size=1MiB&write={write}", num_ranks=num_ranks, engine=PatientEngine)
    PatientEngine.worker = worker
    assert play(worker, FIRST, SECOND, FIRST) == [0, 0, 72]
    assert worker.control is not None
    counters = worker.control.core.counters.counts
    assert counters["tier_loads"] == 1
    assert counters["tier_blocks_read_host"] > 0
    assert not counters["tier_blocks_missed_host"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_life_of_a_worker_finds_its_store_again(tmp_path: Path, num_ranks: int) -> None:
    place = f"disk:{tmp_path}/kv?size=1MiB"
    assert play(worker_with(place, num_ranks=num_ranks), FIRST) == [0]
    assert play(worker_with("host?size=1MiB", place, num_ranks=num_ranks), FIRST) == [72]


def test_other_numbers_of_ranks_share_a_directory_and_no_block(tmp_path: Path) -> None:
    """Nor do two ranks: each finds what it wrote itself."""
    place = f"disk:{tmp_path}/kv?size=1MiB"
    assert play(worker_with(place, num_ranks=2), FIRST) == [0]
    assert play(worker_with(place), FIRST) == [0]
    assert play(worker_with(place, num_ranks=3), FIRST) == [0]
    assert play(worker_with(place, num_ranks=2), FIRST) == [72]
    parts = [tmp_path / "kv" / f"rank-{rank}-of-2" for rank in range(2)]
    parts[0].rename(tmp_path / "aside")
    parts[1].rename(parts[0])
    (tmp_path / "aside").rename(parts[1])
    assert play(worker_with(place, num_ranks=2), FIRST) == [0]


def test_what_one_rank_lacks_is_not_known(tmp_path: Path) -> None:
    place = f"disk:{tmp_path}/kv?size=1MiB"
    assert play(worker_with(place, num_ranks=2), FIRST) == [0]
    for path in files_in(tmp_path / "kv" / "rank-1-of-2"):
        path.unlink()
    worker = worker_with(place, num_ranks=2)
    assert play(worker, FIRST) == [0]
    assert worker.control is not None
    assert "tier_loads" not in worker.control.core.counters.counts


@pytest.mark.parametrize(
    ("num_ranks", "damaged"), [(1, "."), (2, "rank-0-of-2"), (2, "rank-1-of-2")]
)
def test_damaged_blocks_are_computed(tmp_path: Path, num_ranks: int, damaged: str) -> None:
    place = f"disk:{tmp_path}/kv?size=1MiB"
    assert play(worker_with(place, num_ranks=num_ranks), FIRST) == [0]
    for path in files_in(tmp_path / "kv" / damaged):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    worker = worker_with(place, num_ranks=num_ranks)
    assert play(worker, FIRST) == [0]
    assert worker.control is not None
    counters = worker.control.core.counters.counts
    assert counters["tier_blocks_missed_disk"] > 0
    assert counters["tier_loads_failed"] > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_directory_that_others_may_write_to_ends_the_start(
    tmp_path: Path, num_ranks: int
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        worker_with(f"disk:{tmp_path}/kv?size=1MiB", num_ranks=num_ranks).start()


def test_what_is_no_tier_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="tape"):
        worker_with("tape?size=1MiB").start()
