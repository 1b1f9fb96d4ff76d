"""Work that takes longer than a thread costs; where it waits, tenants take turns."""

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from disagg.errors import CapacityError
from disagg.routing.fair_queue import FairQueue

_T = TypeVar("_T")


class _Job:
    def __init__(self, tenant: str, key: str, size: int, work: Callable[[], Any]) -> None:
        self.tenant = tenant
        self.key = key
        self.size = size
        self.work = work
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class FairThreads:
    """A few threads for the work of many tenants. Used from one event loop.

    Args:
        num_threads: of them.
        waiting_max: jobs that wait; of more the longest queue's newest is refused.
        weights: of tenants, as where requests wait for workers.
        rests: each thread does nothing after a job for as long as that took. For work that keeps
            Python's lock: the event loop would have it for milliseconds between two jobs.

    Raises:
        RuntimeError: the system has no thread left.
    """

    def __init__(
        self,
        num_threads: int,
        waiting_max: int,
        weights: Mapping[str, float],
        *,
        rests: bool = False,
    ) -> None:
        self._rests = rests
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._make_threads(num_threads)
        self._num_idle = num_threads
        self._waiting_max = waiting_max
        self._queue: FairQueue[_Job] = FairQueue(weights)
        self._num_jobs = 0

    def close(self) -> None:
        """End the threads; what waits is not done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, size: int, work: Callable[[], _T]) -> _T:
        """Do the work in a thread when its tenant has its turn; ``size`` is what it costs.

        Raises:
            CapacityError: too much waits, most of it this tenant's.
        """
        if len(self._queue) >= self._waiting_max:
            self._make_place(tenant)
        self._num_jobs += 1
        job = _Job(tenant, str(self._num_jobs), size, work)
        self._queue.push(tenant, job.key, job)
        self._start()
        try:
            result: _T = await job.done
            return result
        finally:
            self._queue.remove(tenant, job.key)
            del job  # its error refers to this frame: megabytes would wait for the collector

    def _make_threads(self, num: int) -> None:
        """Make all of them now: without a thread for it a job is kept, and never done."""
        all_made = threading.Barrier(num)
        try:
            for _ in range(num):
                self._threads.submit(all_made.wait)
        except RuntimeError:
            all_made.abort()  # nor waits one that was made, which would outlive the process's end
            raise

    def _make_place(self, tenant: str) -> None:
        refusal = CapacityError(f"{self._waiting_max} requests are being prepared")
        longest = self._queue.longest()
        if longest is None or not self._queue.is_longer(longest, tenant):
            raise refusal
        job = self._queue.last(longest)
        self._queue.remove(longest, job.key)
        if not job.done.done():
            job.done.set_exception(refusal)

    def _start(self) -> None:
        while self._num_idle and (heads := self._queue.heads()):
            tenant, job = heads[0]
            self._queue.take(tenant, job.size)
            self._num_idle -= 1
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, job.work)
            running.add_done_callback(functools.partial(self._ended, job, loop.time()))

    def _ended(self, job: _Job, began_s: float, ended: "asyncio.Future[Any]") -> None:
        if self._rests:
            loop = asyncio.get_running_loop()
            loop.call_later(loop.time() - began_s, self._rested)
        else:
            self._num_idle += 1
        error = None if ended.cancelled() else ended.exception()
        if not job.done.done():  # else nobody waits any more
            if ended.cancelled():
                job.done.cancel()
            elif error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(ended.result())
        self._start()

    def _rested(self) -> None:
        self._num_idle += 1
        self._start()
