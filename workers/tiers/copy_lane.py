"""Threads that carry copies to a tier or from it, one direction; what waits for them is bounded."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.scheduling.actions import TierKey


@dataclass(slots=True, eq=False)
class Copy:
    """Blocks on their way between the pool and a tier.

    Attributes:
        blocks: key and block id of each.
        good: of each block, whether it arrived.
        evicted: what the tier gave up for them.
        error: why some did not arrive, if that is known of the copy as a whole.
        num_open: pieces that have not ended.
    """

    copy_id: int
    blocks: Sequence[tuple[TierKey, int]]
    good: list[bool] = field(init=False)
    evicted: list[TierKey] = field(default_factory=list)
    error: str = ""
    num_open: int = 0

    def __post_init__(self) -> None:
        self.good = [False] * len(self.blocks)


Piece = tuple[Copy, int, int]
"""Blocks ``first`` to ``end`` of a copy; one thread carries it."""


class CopyLane:
    """Carries copies piece by piece, the oldest first.

    A copy ends when the last of its pieces has; then nobody touches its blocks any more. While
    the lane stands still, nothing ended for ``slow_s`` though something is being carried, it takes
    no copies, and those that wait end without having been carried.

    Args:
        name: of the threads.
        num_threads: at least one.
        carry: carries one piece, and notes in its copy what became of it; called from the threads.
        on_end: takes each copy that has ended, exactly once; called from the threads, or by
            whoever submits or looks.
        blocks_max: that wait at most, but for one copy that alone has more.
        niceness: of the threads beyond the process's, where the system lets them have their own.
        slow_s: see above.
        clock_s: a clock that never goes back.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        carry: Callable[[Piece], None],
        on_end: Callable[[Copy], None],
        *,
        blocks_max: int,
        piece_blocks_max: int,
        niceness: int = 0,
        slow_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._carry = carry
        self._on_end = on_end
        self._num_threads = num_threads
        self._blocks_max = blocks_max
        self._piece_blocks_max = piece_blocks_max
        self._niceness = niceness
        self._slow_s = slow_s
        self._clock_s = clock_s
        self._wake = threading.Condition()
        self._waiting: deque[Piece] = deque()
        self._num_waiting = 0
        self._carried: list[Copy] = []
        self._progress_s = 0.0
        self._slow = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a copy has not ended."""
        with self._wake:
            return bool(self._carried or self._waiting)

    def submit(self, copy: Copy) -> None:
        """Queue a copy; one that is not taken ends at once, with its error."""
        with self._wake:
            if self._closed:
                copy.error = "closed"
            elif self._slow:
                copy.error = "slow"
            elif self._waiting and self._num_waiting + len(copy.blocks) > self._blocks_max:
                copy.error = "queue full"
            if not copy.error and copy.blocks:
                if not self._carried and not self._waiting:
                    self._progress_s = self._clock_s()
                pieces = self._cut(copy)
                copy.num_open = len(pieces)
                self._waiting += pieces
                self._num_waiting += len(copy.blocks)
                self._wake.notify(len(pieces))
                return
        self._on_end(copy)

    def look(self) -> None:
        """See whether the lane stands still; if so, end what waits. To be called now and then."""
        with self._wake:
            late = self._clock_s() - self._progress_s > self._slow_s
            self._slow = bool(self._carried) and late
            ended = self._drop_waiting("slow") if self._slow else []
        for copy in ended:
            self._on_end(copy)

    def close(self, timeout_s: float) -> bool:
        """End what waits, let what is being carried end; False if that takes longer."""
        with self._wake:
            self._closed = True
            ended = self._drop_waiting("closed")
            self._wake.notify_all()
        for copy in ended:
            self._on_end(copy)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- inside

    def _cut(self, copy: Copy) -> list[Piece]:
        """Pieces for all threads to take part, none larger than the bound."""
        num_blocks = len(copy.blocks)
        size = min(self._piece_blocks_max, -(-num_blocks // self._num_threads))
        return [
            (copy, first, min(first + size, num_blocks)) for first in range(0, num_blocks, size)
        ]

    def _drop_waiting(self, error: str) -> list[Copy]:
        """Under the lock: take every piece that waits out; returns the copies that ended by it."""
        ended = []
        for copy, _, _ in self._waiting:
            copy.error = error
            copy.num_open -= 1
            if not copy.num_open:
                ended.append(copy)
        self._waiting.clear()
        self._num_waiting = 0
        return ended

    def _run(self) -> None:
        if self._niceness:
            with contextlib.suppress(OSError, AttributeError):
                thread = threading.get_native_id()
                nice = os.getpriority(os.PRIO_PROCESS, thread) + self._niceness
                os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))
        while (piece := self._take()) is not None:
            copy, first, end = piece
            try:
                self._carry(piece)
            except Exception as error:
                copy.good[first:end] = [False] * (end - first)
                copy.error = repr(error)
            with self._wake:
                self._progress_s = self._clock_s()
                self._slow = False
                self._carried.remove(copy)
                copy.num_open -= 1
                has_ended = not copy.num_open
            if has_ended:
                self._on_end(copy)

    def _take(self) -> Piece | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            piece = self._waiting.popleft()
            copy, first, end = piece
            if not self._carried:
                self._progress_s = self._clock_s()
            self._num_waiting -= end - first
            self._carried.append(copy)
            return piece
