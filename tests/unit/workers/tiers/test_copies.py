"""`TierCopies`: copies on threads, their ends on the loop, nothing waits without a bound."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from disagg.scheduling.actions import TierKey
from disagg.workers.tiers import tier_lanes
from disagg.workers.tiers.copies import TierCopies
from disagg.workers.tiers.options import TierOptions
from tests.unit.workers.tiers.pools import WAIT_S, Pool, ScriptedTier
from tests.unit.workers.tiers.stored_blocks import BLOCK_BYTES, content_of, key_of

CLEARED = -1
KEYS = [key_of(number) for number in range(12)]


class Worker:
    """Copies over one pool and one tier, and what was reported of them."""

    def __init__(self, num_threads: int = 2, num_parts: int = 1, slow_ms: int = 60_000) -> None:
        self.pool = Pool(24, num_parts)
        self.tier = ScriptedTier()
        self.ends: dict[int, tuple[Any, ...]] = {}
        self.now_s = 0.0
        self._changed = asyncio.Event()
        options = TierOptions(
            "x", "scripted", "", 1 << 20, num_threads=num_threads, slow_ms=slow_ms
        )
        self.copies = TierCopies(
            [(options, self.tier)],
            self.pool.region,
            self._ended,
            self._ended,
            asyncio.get_running_loop(),
            on_cleared=self._cleared,
            clock_s=lambda: self.now_s,
        )

    def _cleared(self, tier: str, error: str) -> None:
        assert tier == "scripted"
        self._ended(CLEARED, error)

    def _ended(self, copy_id: int, *what: Any) -> None:
        assert copy_id not in self.ends, "reported twice"
        self.ends[copy_id] = what
        self._changed.set()

    def write(self, copy_id: int, keys: Sequence[TierKey]) -> None:
        for block, key in enumerate(keys):
            self.pool.fill(block, content_of(key))
        self.copies.submit_write(copy_id, "scripted", [(key, i) for i, key in enumerate(keys)])

    def read(self, copy_id: int, keys: Sequence[TierKey], first: int = 12) -> None:
        blocks = [(key, first + i) for i, key in enumerate(keys)]
        self.copies.submit_read(copy_id, "scripted", blocks)

    async def end_of(self, copy_id: int) -> tuple[Any, ...]:
        async with asyncio.timeout(WAIT_S):
            while copy_id not in self.ends:
                self._changed.clear()
                await self._changed.wait()
        return self.ends[copy_id]

    async def entered(self, number: int = 1) -> None:
        """Until so many calls of the tier have begun."""
        for _ in range(number):
            assert await asyncio.to_thread(self.tier.entered.acquire, timeout=WAIT_S)


@pytest.fixture
async def build() -> AsyncIterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def build(**options: int) -> Worker:
        workers.append(Worker(**options))
        return workers[-1]

    yield build
    for worker in workers:
        worker.tier.may_go.set()
        assert await asyncio.to_thread(worker.copies.close, WAIT_S)
        assert worker.tier.is_closed


Build = Callable[..., Worker]


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("num_threads", [1, 3])
async def test_blocks_go_to_the_tier_and_come_back(
    build: Build, num_parts: int, num_threads: int
) -> None:
    worker = build(num_threads=num_threads, num_parts=num_parts)
    worker.write(1, KEYS)
    assert 1 not in worker.ends  # never within the call
    assert await worker.end_of(1) == (tuple(KEYS), (), "")
    assert worker.tier.blocks == {key: content_of(key) for key in KEYS}
    missing = key_of(99)
    worker.tier.forget([KEYS[3]])
    worker.read(2, [*KEYS[:5], missing])
    assert await worker.end_of(2) == ((True, True, True, False, True, False),)
    for i in (0, 1, 2, 4):
        assert worker.pool.content(12 + i) == content_of(KEYS[i])
    counts = worker.copies.counts()["scripted"]
    assert (counts["written"], counts["read"], counts["missed"]) == (12, 4, 2)


async def test_a_miss_is_not_copied_into_a_pool_in_parts(build: Build) -> None:
    worker = build(num_parts=2)
    worker.pool.fill(12, b"p" * BLOCK_BYTES)
    worker.read(1, KEYS[:1])
    assert await worker.end_of(1) == ((False,),)
    assert worker.pool.content(12) == b"p" * BLOCK_BYTES


async def test_nothing_to_copy_ends_as_well(build: Build) -> None:
    worker = build()
    worker.read(1, [])
    worker.write(2, [])
    assert await worker.end_of(1) == ((),)
    assert await worker.end_of(2) == ((), (), "")


async def test_a_tier_is_emptied_on_a_thread(build: Build) -> None:
    worker = build()
    worker.write(1, KEYS)
    await worker.end_of(1)
    worker.tier.may_go.clear()
    worker.copies.submit_clear("scripted")
    await worker.entered(2)  # the write, and this
    assert worker.ends.keys() == {1}, "the loop goes on meanwhile"
    worker.tier.may_go.set()
    assert await worker.end_of(CLEARED) == ("",)
    assert not worker.tier.blocks
    assert worker.copies.counts()["scripted"]["cleared"] == 1


async def test_why_a_tier_could_not_be_emptied_is_said(build: Build) -> None:
    worker = build()
    worker.tier.error = OSError("read-only")
    worker.copies.submit_clear("scripted")
    assert await worker.end_of(CLEARED) == ("OSError('read-only')",)
    assert worker.copies.counts()["scripted"]["not_cleared"] == 1
    worker.tier.error = None


async def test_what_the_tier_gave_up_is_not_stored(build: Build) -> None:
    worker = build(num_threads=1)
    worker.tier.gives_up = (KEYS[0], KEYS[9])
    worker.write(1, KEYS[:3])
    assert await worker.end_of(1) == ((KEYS[1], KEYS[2]), (KEYS[0], KEYS[9]), "")


async def test_a_tier_that_raises_is_a_miss(build: Build) -> None:
    worker = build(num_threads=1)
    worker.tier.error = ZeroDivisionError("a bug")
    worker.write(1, KEYS[:2])
    assert await worker.end_of(1) == ((), (), "ZeroDivisionError('a bug')")
    worker.read(2, KEYS[:2])
    assert await worker.end_of(2) == ((False, False),)
    worker.tier.error = None
    worker.write(3, KEYS[:2])
    assert (await worker.end_of(3))[0] == tuple(KEYS[:2])
    assert worker.copies.counts()["scripted"]["ZeroDivisionError"] == 2


@pytest.mark.parametrize("answer", [(True,), (True, True, True), (1, "yes")])
async def test_an_answer_that_does_not_fit_is_a_miss(build: Build, answer: Any) -> None:
    worker = build(num_threads=1)
    worker.tier.answer = answer
    worker.read(1, KEYS[:2])
    assert await worker.end_of(1) == ((False, False),)


async def test_reads_do_not_wait_for_writes(build: Build) -> None:
    worker = build(num_threads=1)
    worker.write(1, KEYS[:1])
    await worker.end_of(1)
    await worker.entered()
    worker.tier.may_go.clear()
    worker.write(2, KEYS[1:2])
    await worker.entered()
    worker.read(3, KEYS[:1])
    await worker.entered()  # it is in the tier while the write is
    worker.tier.may_go.set()
    assert await worker.end_of(3) == ((True,),)


async def test_a_copy_ends_with_its_last_piece(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_lanes, "PIECE_BYTES", BLOCK_BYTES)
    worker = build(num_threads=2)
    worker.tier.blocks = {key: content_of(key) for key in KEYS}
    worker.tier.may_go.clear()
    worker.read(1, KEYS[:3])
    await worker.entered(2)
    assert worker.tier.num_calls == 2  # a thread each; the third block waits
    assert not worker.ends
    worker.tier.may_go.set()
    assert await worker.end_of(1) == ((True, True, True),)


async def test_waiting_is_bounded_in_bytes(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_lanes, "WAITING_BYTES_MAX", 3 * BLOCK_BYTES)
    worker = build(num_threads=1)
    worker.tier.may_go.clear()
    worker.write(1, KEYS[:1])
    await worker.entered()
    worker.write(2, KEYS[:9])  # alone it may exceed the bound
    worker.write(3, KEYS[:1])
    assert await worker.end_of(3) == ((), (), "queue full")
    worker.tier.may_go.set()
    await worker.end_of(2)
    worker.write(4, KEYS[:1])
    assert (await worker.end_of(4))[0] == (KEYS[0],)
    assert worker.copies.counts()["scripted"]["queue_full"] == 1


async def test_nobody_waits_for_a_tier_that_stands_still(build: Build) -> None:
    """What it has not begun is a miss; what it is inside of ends when it does."""
    worker = build(num_threads=1, slow_ms=1000)
    worker.tier.blocks = {KEYS[0]: content_of(KEYS[0])}
    worker.tier.may_go.clear()
    worker.read(1, KEYS[:1], first=12)
    await worker.entered()
    worker.read(2, KEYS[:1], first=13)
    worker.now_s += 0.9
    worker.copies._look()
    assert not worker.ends
    worker.now_s += 0.2
    assert await worker.end_of(2) == ((False,),)
    worker.read(3, KEYS[:1], first=14)
    assert await worker.end_of(3) == ((False,),)
    assert 1 not in worker.ends  # its block may still be written to
    assert worker.copies.counts()["scripted"]["slow"] == 2
    worker.tier.may_go.set()
    assert await worker.end_of(1) == ((True,),)
    worker.read(4, KEYS[:1], first=15)
    assert await worker.end_of(4) == ((True,),)
    assert worker.pool.content(13) == worker.pool.content(14) == bytes(BLOCK_BYTES)


async def test_a_tier_that_moves_is_waited_for(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is on standing still: it begins anew with each piece."""
    monkeypatch.setattr(tier_lanes, "PIECE_BYTES", BLOCK_BYTES)
    worker = build(num_threads=1, slow_ms=1000)
    worker.tier.blocks = {key: content_of(key) for key in KEYS}
    real, steps = worker.tier.read, []

    def read(blocks: Any) -> tuple[bool, ...]:
        worker.now_s += 0.9
        steps.append(worker.now_s)
        return real(blocks)

    monkeypatch.setattr(worker.tier, "read", read)
    worker.read(1, KEYS[:9])
    worker.copies._look()
    assert await worker.end_of(1) == ((True,) * 9,)
    assert steps[-1] > 8  # eight times what a tier may stand still


async def test_nothing_is_reported_after_the_close(build: Build) -> None:
    worker = build(num_threads=1)
    worker.tier.may_go.clear()
    worker.read(1, KEYS[:1])
    await worker.entered()
    worker.read(2, KEYS[:1])
    assert not await asyncio.to_thread(worker.copies.close, 0.01)
    assert not worker.tier.is_closed  # a thread is inside of it
    worker.tier.may_go.set()
    assert await asyncio.to_thread(worker.copies.close, WAIT_S)
    worker.read(3, KEYS[:1])
    await asyncio.sleep(0)
    assert not worker.ends


@pytest.mark.parametrize("num_parts", [1, 2])
async def test_blocks_outside_of_the_pool_are_a_miss(build: Build, num_parts: int) -> None:
    worker = build(num_parts=num_parts)
    worker.copies.submit_read(1, "scripted", [(KEYS[0], 24)])
    assert await worker.end_of(1) == ((False,),)
    worker.copies.submit_write(2, "scripted", [(KEYS[0], -1)])
    assert (await worker.end_of(2))[0] == ()
