"""Checksums of a pool's blocks, of one rank and of several; whole workers whose bits flip."""

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from disagg.errors import ConfigError
from disagg.transfer.read_plan import plan_reads
from disagg.workers import checksums
from disagg.workers.announcement import contract_of
from disagg.workers.checksums import ALGORITHM, PoolChecksums, combined
from disagg.workers.engines.protocol import Engine
from disagg.workers.pool_region import PoolRegion
from disagg.workers.ranked_checksums import RankedChecksums, start_checksums
from disagg.workers.tiers.contract import TierContract
from disagg.workers.transport import KVTransport
from disagg.workers.transport_choice import nixl_transport
from disagg.workers.worker import Worker
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.test_unequal_workers import Sessions, options_of, prompt_of

NUM_BLOCKS, BLOCK_BYTES = 12, 4096
BOUND_S = 60.0


class Answers:
    """What is said of requests, from whatever thread."""

    def __init__(self) -> None:
        self._said: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def known(self, request_id: int, found: Sequence[int]) -> None:
        self._said.put((request_id, list(found)))

    def failed(self, reason: str) -> None:
        self._said.put(("failed", reason))

    def next(self) -> tuple[Any, ...]:
        return self._said.get(timeout=BOUND_S)


def pool_of(num_parts: int) -> tuple[PoolRegion, np.ndarray]:
    """A pool of random bytes, and the bytes of each of its blocks."""
    memory = np.random.default_rng(num_parts).integers(0, 256, NUM_BLOCKS * BLOCK_BYTES, np.uint8)
    region = PoolRegion(
        memory.ctypes.data, NUM_BLOCKS, BLOCK_BYTES, "DRAM", 0, memory, num_parts=num_parts
    )
    parts = memory.reshape(num_parts, NUM_BLOCKS, -1)
    return region, parts.transpose(1, 0, 2)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_of_each_block_all_bytes_count(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that lie in several parts too, which are copied piece by piece."""
    monkeypatch.setattr(checksums, "PIECE_BYTES", 2 * BLOCK_BYTES)
    region, blocks = pool_of(num_parts)
    answers = Answers()
    computes = PoolChecksums(region, answers.known, answers.failed)
    order = [7, 0, 11, 3, 4]
    computes.compute(1, order)
    expected = [xxhash.xxh3_64_intdigest(blocks[b].tobytes()) for b in order]
    assert answers.next() == (1, expected)
    blocks[11, num_parts - 1, -1] ^= 1
    computes.compute(2, order)
    _, found = answers.next()
    assert [one != other for one, other in zip(found, expected, strict=True)] == [
        block == 11 for block in order
    ]
    assert computes.counts()["checksummed_blocks"] == 10
    assert computes.close(BOUND_S)


def test_whatever_fails_is_said() -> None:
    """Who waits for a checksum would wait for ever."""
    region, _ = pool_of(1)
    answers = Answers()
    PoolChecksums(region, answers.known, answers.failed).compute(1, [NUM_BLOCKS])
    kind, reason = answers.next()
    assert kind == "failed"
    assert f"block {NUM_BLOCKS}" in reason


def test_of_several_ranks_every_part_counts() -> None:
    engine = DigestEngine(NUM_BLOCKS, num_heads=2, num_ranks=2)
    answers = Answers()
    computes = start_checksums(engine.region, answers.known, answers.failed)
    assert isinstance(computes, RankedChecksums)
    for rank, cells in enumerate(engine._ranks):
        cells[:] = np.arange(cells.size).reshape(cells.shape) * (rank + 1)
    computes.compute(1, [1, 2])
    computes.compute(2, [3])
    parts = [[xxhash.xxh3_64_intdigest(cells[b]) for b in (1, 2)] for cells in engine._ranks]
    said = sorted([answers.next(), answers.next()])
    assert said[0] == (1, [combined(of_block) for of_block in zip(*parts, strict=True)])
    for cells in engine._ranks:
        cells[2, 0] ^= 1
        computes.compute(3, [1, 2])
        _, found = answers.next()
        assert (found[0], found[1] == said[0][1][1]) == (said[0][1][0], False)
        cells[2, 0] ^= 1
    assert combined([1, 2]) != combined([2, 1])
    computes.compute(4, [NUM_BLOCKS])
    assert answers.next()[0] == "failed"
    assert computes.close(BOUND_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_of_device_memory() -> None:
    memory = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    region = PoolRegion(
        memory.data_ptr(), NUM_BLOCKS, BLOCK_BYTES, "VRAM", memory.get_device(), memory
    )
    answers = Answers()
    PoolChecksums(region, answers.known, answers.failed).compute(1, [5, 2])
    host = memory.cpu().numpy()
    assert answers.next() == (1, [xxhash.xxh3_64_intdigest(host[block]) for block in (5, 2)])


# -- who may exchange KV ----------------------------------------------------------------------


def contract(*shape: int, with_checksums: bool) -> Any:
    block_tokens, num_ranks = shape
    engine = DigestEngine(20, block_tokens, 2, num_ranks)
    layout = replace(engine.layout, hash_block_tokens=4)
    return contract_of(engine, layout, b"key", with_checksums)


def test_workers_pair_where_both_compute_checksums_or_neither() -> None:
    ours, theirs = (contract(4, 1, with_checksums=one) for one in (True, False))
    assert plan_reads(ours, ours) is None
    with pytest.raises(ConfigError, match=f"checksums: '' != '{ALGORITHM}'"):
        plan_reads(ours, theirs)


@pytest.mark.parametrize("other", [(8, 1), (4, 2)])
def test_blocks_that_are_read_in_parts_have_none(other: tuple[int, int]) -> None:
    """A checksum is of a block as its owner has it: no reader of parts could compare it."""
    assert plan_reads(contract(4, 1, with_checksums=False), contract(*other, with_checksums=False))
    with pytest.raises(ConfigError, match="is of whole blocks"):
        plan_reads(contract(4, 1, with_checksums=True), contract(*other, with_checksums=True))


def test_tiers_keep_their_blocks_when_the_setting_changes() -> None:
    """What is stored is the same with and without."""
    names = {TierContract.of(contract(4, 1, with_checksums=one)).name for one in (True, False)}
    assert len(names) == 1


# -- whole workers ----------------------------------------------------------------------------


class Flips:
    """Flips a bit of a rank's part of the first block of every READ, while it is on."""

    def __init__(self, engine: DigestEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._reads: dict[int, int] = {}
        self.is_on = False

    def transport(
        self,
        agent: str,
        engine: Engine,
        on_read_done: Callable[[int, str], None],
        handle_bytes_max: int,
    ) -> KVTransport:
        def done(read_id: int, error: str) -> None:
            block = self._reads.pop(read_id)
            if self.is_on:
                self._engine._ranks[self._rank][block, 0] ^= 1
            on_read_done(read_id, error)

        transport = nixl_transport(agent, engine, done, handle_bytes_max)
        read = transport.read

        def remembered(read_id: int, peer: str, src: Any, dst: Any, parts: Any = ()) -> None:
            self._reads[read_id] = dst[0]
            read(read_id, peer, src, dst, parts)

        transport.read = remembered  # type: ignore[method-assign, assignment]
        return transport


Made = list[tuple[Worker, DigestEngine]]


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Made, Flips]]:
    """A prefill and a decode worker; the last rank's bits may flip at the prefill worker."""
    num_ranks: int = request.param
    engines = [DigestEngine(300, 4, 2, num_ranks) for _ in range(2)]
    flips = Flips(engines[0], num_ranks - 1)

    def worker_of(name: str, engine: DigestEngine) -> Worker:
        return Worker(
            replace(options_of(name), checksums=True),
            engine_factory=lambda _: engine,
            transport_factory=flips.transport if name == "p" else nixl_transport,
        )

    workers = [worker_of(name, engine) for name, engine in zip("pd", engines, strict=True)]
    for worker in workers:
        worker.start()
    try:
        yield list(zip(workers, engines, strict=True)), flips
    finally:
        for worker in workers:
            assert worker.stop()
            assert worker.failed == ""


def test_flipped_bits_of_any_rank_are_computed_anew(made: tuple[Made, Flips]) -> None:
    workers, flips = made
    sessions = Sessions(*workers)
    reader = workers[0][0]

    def num_mismatches() -> int:
        assert reader.control is not None
        return reader.control.core.inbound.num_mismatches

    async def run() -> None:
        async with sessions.opened():
            for length in (3, 9, 23):
                tokens, report = await sessions.hand_over(prompt_of(length))
                assert tokens == sessions.expected(prompt_of(length))
            for salt, is_on in ((31, False), (37, True)):
                prompt = prompt_of(40, salt=salt)
                await sessions.serve("d", prompt)
                flips.is_on = is_on
                tokens, report = await sessions.serve("p", (*prompt, 5), pull_from="d")
                assert tokens == sessions.expected((*prompt, 5))
                assert report is not None
                assert ("checksums differ" in report.failed) == is_on
                assert (num_mismatches() > 0) == is_on

    asyncio.run(run())
