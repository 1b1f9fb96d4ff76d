"""Preparation of requests: who waits for a thread, and who is refused."""

import asyncio
import gc
import threading
import time
import weakref
from itertools import pairwise

import pytest

from disagg.errors import CapacityError
from disagg.router.fair_threads import FairThreads


class Work:
    """Jobs that note their order; the first one holds the thread until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.order: list[str] = []

    def job(self, name: str):
        def work() -> str:
            self.gate.wait(60)
            self.order.append(name)
            return name

        return work


@pytest.fixture
def work():
    made = Work()
    yield made
    made.gate.set()


async def start(
    threads: FairThreads, work: Work, tenant: str, *names: str
) -> list["asyncio.Task[str]"]:
    tasks = [asyncio.create_task(threads.run(tenant, 100, work.job(name))) for name in names]
    await asyncio.sleep(0)  # each has come as far as its future
    return tasks


async def test_a_flood_does_not_keep_another_tenant_waiting(work) -> None:
    threads = FairThreads(1, 100, {})
    tasks = await start(threads, work, "a", *(f"a{n}" for n in range(20)))
    tasks += await start(threads, work, "b", "b0", "b1")
    work.gate.set()
    assert await asyncio.gather(*tasks) == [*(f"a{n}" for n in range(20)), "b0", "b1"]
    assert work.order[:5] == ["a0", "b0", "a1", "b1", "a2"]
    threads.close()


async def test_the_longest_queue_gives_its_newest_up(work) -> None:
    threads = FairThreads(1, 5, {})
    flood = await start(threads, work, "a", *(f"a{n}" for n in range(6)))
    with pytest.raises(CapacityError):
        await threads.run("a", 1, work.job("more"))
    (other,) = await start(threads, work, "b", "b0")
    work.gate.set()
    assert await other == "b0"
    ended = await asyncio.gather(*flood, return_exceptions=True)
    assert ended[:5] == [f"a{n}" for n in range(5)]
    assert isinstance(ended[5], CapacityError)
    threads.close()


async def test_errors_and_cancels_free_the_thread(work) -> None:
    threads = FairThreads(1, 5, {})
    first, second = await start(threads, work, "a", "a0", "a1")
    second.cancel()

    def fail() -> None:
        raise ValueError("no")

    failing = asyncio.create_task(threads.run("a", 1, fail))
    await asyncio.sleep(0)
    first.cancel()  # the thread is still at it
    work.gate.set()
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await threads.run("a", 1, work.job("last")) == "last"
    assert work.order == ["a0", "last"]
    threads.close()


async def test_a_moment_without_threads_costs_no_job(work, monkeypatch) -> None:
    threads = FairThreads(2, 100, {})

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work.gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        for name in ("first", "second"):
            async with asyncio.timeout(60):
                assert await threads.run("a", 1, work.job(name)) == name
    async with asyncio.timeout(60):
        assert await threads.run("a", 1, work.job("third")) == "third"
    threads.close()


def test_a_start_without_threads_is_an_error_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, made = threading.Thread.start, list[threading.Thread]()

    def only_one(thread: threading.Thread) -> None:
        if made:
            raise RuntimeError("can't start new thread")
        made.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    with pytest.raises(RuntimeError, match="new thread"):
        FairThreads(2, 100, {})
    made[0].join(60)
    assert not made[0].is_alive()


async def test_a_thread_rests_for_as_long_as_a_job_took() -> None:
    """A job that keeps Python's lock leaves the event loop milliseconds until the next one."""
    threads = FairThreads(1, 100, {}, rests=True)
    times_s: list[tuple[float, float]] = []

    def work() -> None:
        began_s = time.monotonic()
        time.sleep(0.1)
        times_s.append((began_s, time.monotonic()))

    await asyncio.gather(*(threads.run("a", 1, work) for _ in range(3)))
    for (began_s, ended_s), (next_s, _) in pairwise(times_s):
        assert next_s - ended_s > 0.9 * (ended_s - began_s)
    threads.close()


async def test_what_a_failed_job_had_needs_no_garbage_collector() -> None:
    """It may have made 200 MB of a client's body, and the collector comes seldom."""
    threads = FairThreads(1, 100, {})
    made: list[weakref.ref[threading.Event]] = []

    def work() -> None:
        kept = threading.Event()
        made.append(weakref.ref(kept))
        raise ValueError("no request")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="no request"):
            await threads.run("a", 1, work)
        for _ in range(100):
            if made[0]() is None:
                break
            await asyncio.sleep(0.02)
        assert made[0]() is None
    finally:
        gc.enable()
    threads.close()
