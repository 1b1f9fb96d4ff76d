"""Tiers of several ranks from the worker's process: who ends, is late, or refuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.workers.tiers import ranked_copies
from disagg.workers.tiers.ranked_copies import RankedCopies, open_on_ranks
from tests.unit.workers.tiers.pools import WAIT_S
from tests.unit.workers.tiers.stored_blocks import BLOCK_BYTES, REGISTERED, key_of

KEYS = [key_of(number) for number in range(3)]
BLOCKS = [(key, number) for number, key in enumerate(KEYS)]
NUM_RANKS = 2


class Worker:
    """A worker's end of the connections; the test is the ranks."""

    def __init__(self) -> None:
        pairs = [Pipe() for _ in range(NUM_RANKS)]
        self.ranks: list[Connection[Any, Any]] = [theirs for _, theirs in pairs]
        self.ends: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.copies = RankedCopies(
            [ours for ours, _ in pairs],
            lambda *end: self.ends.put_nowait(("written", *end)),
            lambda *end: self.ends.put_nowait(("read", *end)),
            self.loop,
            on_cleared=lambda *end: self.ends.put_nowait(("cleared", *end)),
            on_failed=lambda why: self.say(("failed", why)),
        )

    def say(self, end: tuple[Any, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # the test is over
            self.loop.call_soon_threadsafe(self.ends.put_nowait, end)

    async def end(self) -> tuple[Any, ...]:
        async with asyncio.timeout(WAIT_S):
            return await self.ends.get()

    async def told(self, rank: int) -> tuple[Any, ...]:
        """The next command of a rank."""

        def receive() -> tuple[Any, ...]:
            assert self.ranks[rank].poll(WAIT_S)
            command: tuple[Any, ...] = self.ranks[rank].recv()
            return command

        return await asyncio.to_thread(receive)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    yield made
    for rank in made.ranks:
        rank.close()


async def test_every_rank_is_told_and_the_last_one_ends(worker: Worker) -> None:
    worker.copies.submit_write(7, "disk", BLOCKS)
    for rank in range(NUM_RANKS):
        assert await worker.told(rank) == ("write", 7, "disk", tuple(BLOCKS))
    worker.ranks[1].send(("written", 7, tuple(KEYS), (), ""))
    worker.copies.submit_read(8, "disk", BLOCKS)
    for rank in range(NUM_RANKS):
        assert await worker.told(rank) == ("read", 8, "disk", tuple(BLOCKS))
        worker.ranks[rank].send(("read", 8, (True, rank == 0, True)))
    assert await worker.end() == ("read", 8, (True, False, True))
    worker.ranks[0].send(("written", 7, tuple(KEYS[:2]), (), "slow"))
    assert await worker.end() == ("written", 7, tuple(KEYS[:2]), (), "rank 0: slow")


async def test_all_ranks_empty_a_tier(worker: Worker) -> None:
    worker.copies.submit_clear("disk")
    for rank in range(NUM_RANKS):
        assert await worker.told(rank) == ("clear", "disk")
        worker.ranks[rank].send(("cleared", "disk", ""))
    assert await worker.end() == ("cleared", "disk", "")


async def test_counts_are_those_of_all_ranks(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.copies.counts() == {}
    for rank in range(NUM_RANKS):
        assert await worker.told(rank) == ("count",)
        worker.ranks[rank].send(("counts", {"disk": {"read": 3, "gone": rank}}))
    worker.copies.submit_clear("disk")
    for rank in range(NUM_RANKS):
        worker.ranks[rank].send(("cleared", "disk", ""))
    await worker.end()  # what was sent before has arrived as well
    assert worker.copies.counts() == {"disk": {"read": 6, "gone": 1}}


async def test_a_rank_that_ends_takes_the_worker_along(worker: Worker) -> None:
    worker.copies.submit_read(1, "disk", BLOCKS)
    worker.ranks[1].close()
    assert await worker.end() == ("failed", "the tiers of rank 1 have ended")


async def test_a_rank_that_reports_what_was_not_asked_takes_the_worker_along(
    worker: Worker,
) -> None:
    worker.ranks[0].send(("read", 1, (True,)))
    kind, why = await worker.end()
    assert kind == "failed"
    assert "rank 0 ended a tier copy that it was not told of" in why


async def test_a_rank_that_takes_nothing_holds_up_no_other(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads what is sent to rank 0: sending blocks, submitting does not."""
    monkeypatch.setattr(ranked_copies, "COUNT_S", 0)
    many = BLOCKS * 10_000
    for copy_id in range(5):
        worker.copies.submit_write(copy_id, "disk", many)
        worker.copies.counts()
    for copy_id in range(5):
        while (command := await worker.told(1)) == ("count",):
            pass
        assert command[:2] == ("write", copy_id)


async def test_commands_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_copies, "COMMANDS_MAX", 2)
    worker = Worker()
    many = BLOCKS * 10_000
    for copy_id in range(5):  # one is being sent
        worker.copies.submit_write(copy_id, "disk", many)
    assert await worker.end() == ("failed", "rank 0 takes no commands for its tiers")
    for rank in worker.ranks:
        rank.close()


@pytest.mark.parametrize("answer", [True, False])
async def test_all_ranks_close(worker: Worker, answer: bool) -> None:
    closing = asyncio.create_task(asyncio.to_thread(worker.copies.close, 5.0))
    for rank in range(NUM_RANKS):
        assert await worker.told(rank) == ("close", 5.0)
        worker.ranks[rank].send(("closed", answer or rank == 0))
        worker.ranks[rank].close()
    assert await closing == answer
    assert worker.ends.empty(), "an end that was asked for is no failure"


async def test_a_rank_that_died_did_not_close(worker: Worker) -> None:
    worker.ranks[0].close()
    assert await worker.end() == ("failed", "the tiers of rank 0 have ended")
    worker.ranks[1].send(("closed", True))
    assert not await asyncio.to_thread(worker.copies.close, WAIT_S)


def opened(*answers: tuple[Any, ...]) -> Any:
    pairs = [Pipe() for _ in answers]
    for (_, theirs), answer in zip(pairs, answers, strict=True):
        if answer:
            theirs.send(answer)
        else:
            theirs.close()
    return open_on_ranks([ours for ours, _ in pairs], ["host?size=1MiB"], REGISTERED)


def test_tiers_have_what_all_ranks_have() -> None:
    (tier,) = opened(
        ("opened", [(9 * BLOCK_BYTES, tuple(KEYS))]),
        ("opened", [(8 * BLOCK_BYTES, (KEYS[2], KEYS[1]))]),
    )
    assert (tier.name, tier.blocks_max, tier.known) == ("host", 8, (KEYS[1], KEYS[2]))


@pytest.mark.parametrize(
    ("answer", "said"), [(("refused", "no room"), "rank 1: no room"), ((), "rank 1 has ended")]
)
def test_a_rank_that_cannot_open_its_tiers_ends_the_start(
    answer: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(("opened", [(9 * BLOCK_BYTES, ())]), answer)
