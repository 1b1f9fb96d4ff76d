"""Blocks of the vLLM engine in tiers: tokens from what comes back are plain transformers'."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from disagg.workers.tiers import disk_tier
from disagg.workers.worker import Worker
from tests.unit.workers.lone_worker import NoTransport
from tests.unit.workers.test_worker_with_tiers import serve
from tests.unit.workers.tiers.stored_blocks import files_in
from tests.vllm.engines import make_vllm, vllm_options
from tests.vllm.families import make_family
from tests.vllm.test_ranks import NUM_TOKENS, clear_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTHS = (150, 151, 152, 153)
"""Of prompts; the pool keeps nothing of one when the others have been served after it."""
FOUND = 128
"""Tokens of a prompt in whole blocks of 32."""
CASES = [("gemma3", 40, 1), ("nemotron_h", 24, 1), ("gemma3", 40, 2)]
"""Windows, or linear states; and each block in two processes. Pools have room for one prompt."""


@dataclass(frozen=True)
class Served:
    """Workers over one engine, one after the other."""

    directory: Path
    num_blocks: int
    num_ranks: int
    engine: Any
    prompts: list[list[int]]
    expected: list[list[int]]

    def ask(self, numbers: list[int], *tiers: str) -> tuple[list[list[int]], list[int], Any]:
        """A worker's answers to prompts, how many tokens of each were found, and its counters."""
        options = vllm_options(
            self.directory, self.num_blocks, tensor_parallel=self.num_ranks, tiers=tiers
        )
        worker = Worker(
            options,
            engine_factory=lambda _: self.engine,
            transport_factory=lambda *_: cast(Any, NoTransport()),
        )
        worker.start()
        try:
            prompts = [self.prompts[number] for number in numbers]
            answers = asyncio.run(serve(worker, prompts, NUM_TOKENS))
        finally:
            assert worker.stop()
        assert worker.failed == ""
        assert worker.control is not None
        counters = worker.control.core.counters.counts
        return [tokens for tokens, _ in answers], [found for _, found in answers], counters

    def found(self, numbers: list[int], *tiers: str) -> tuple[list[int], Any]:
        """The same, where all answers are right."""
        tokens, found, counters = self.ask(numbers, *tiers)
        assert tokens == [self.expected[number] for number in numbers]
        return found, counters


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, num_blocks, num_ranks = request.param
    directory = tmp_path_factory.mktemp("tiers") / family
    make_family(directory, family, window=40)
    clear = [clear_prompt(directory, length) for length in LENGTHS]
    engine = make_vllm(directory, num_blocks, tensor_parallel=num_ranks)
    prompts, tokens = [prompt for prompt, _, _ in clear], [tokens for _, tokens, _ in clear]
    return Served(directory, num_blocks, num_ranks, engine, prompts, tokens)


def test_what_prompts_evict_of_each_other_is_reloaded(served: Served, tmp_path: Path) -> None:
    numbers = [0, 1, 2, 3, 0, 1]
    assert served.found(numbers)[0] == [0] * 6, "control: without tiers nothing is found"
    tiers = ("host?size=256MiB", f"disk:{tmp_path}/kv?size=256MiB")
    found, counters = served.found(numbers, *tiers)
    assert found == [0, 0, 0, 0, FOUND, FOUND]
    assert counters["tier_loads"] == 2
    assert counters["tier_blocks_read_host"] > 0
    found, counters = served.found([3, 2], *tiers)
    assert found == [FOUND, FOUND], "another life finds the directory"
    assert counters["tier_blocks_read_disk"] > 0


def test_a_damaged_block_is_a_miss(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks the last one's is; control: believed, it would be another answer."""
    tier = f"disk:{tmp_path}/kv?size=256MiB"
    assert served.found([0], tier)[0] == [0]
    part = f"rank-{served.num_ranks - 1}-of-{served.num_ranks}" if served.num_ranks > 1 else "."
    kept = {path: path.read_bytes() for path in files_in(tmp_path / "kv" / part)}
    spoil(kept)
    found, counters = served.found([0], tier)
    assert found[0] < FOUND
    assert counters["tier_blocks_missed_disk"] > 0
    assert served.found([0], tier)[0] == [FOUND], "written again"
    if served.num_ranks == 1:
        spoil(kept)
        monkeypatch.setattr(disk_tier, "why_not", lambda *_: "")
        tokens, [hit], _ = served.ask([0], tier)
        assert hit == FOUND
        assert tokens != [served.expected[0]]


def spoil(files: dict[Path, bytes]) -> None:
    """Turn over the second half of each file."""
    for path, data in files.items():
        half = len(data) // 2
        path.write_bytes(data[:half] + data[half:][::-1])
