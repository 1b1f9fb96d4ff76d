"""Copies between a worker's pool and its tiers: on threads, reported to the control's loop."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from disagg.scheduling.actions import TierKey
from disagg.workers.pool_region import PoolRegion
from disagg.workers.tiers.copy_lane import Copy
from disagg.workers.tiers.options import TierOptions
from disagg.workers.tiers.pool_memory import PoolMemory
from disagg.workers.tiers.protocol import Tier
from disagg.workers.tiers.tier_lanes import TierLanes

End = TypeVar("End")
LOOK_S = 0.1
"""Between two looks at lanes while something is being copied."""


OnWritten = Callable[[int, tuple[TierKey, ...], tuple[TierKey, ...], str], None]
"""Takes the end of a write: its id, the blocks the tier has now, what it gave up for them, and why
others are missing where that is known of the write as a whole, else "". The pool's blocks are not
read any more."""
OnCleared = Callable[[str, str], None]
"""Takes the name of a tier that was emptied, and why some of it may be left, else ""."""
OnRead = Callable[[int, tuple[bool, ...]], None]
"""Takes the end of a read: its id, and of each block whether it is there, every byte; where it is
not the pool's block holds anything. Nobody writes to them any more."""


def _nobody(tier: str, error: str) -> None:
    """Nobody empties these tiers."""


class TierCopies:
    """Carries out a worker's reads from its tiers and its writes to them.

    Waiting is bounded in bytes, and by a tier that stands still: until it moves again, what it
    has not begun ends at once, as missed or not stored. All methods belong on the loop.

    Args:
        tiers: opened for the pool's contract, in order; closed with this object.
        pool: whose blocks are copied.
        on_written: called on the loop once for each write, never within `submit_write`.
        on_read: the same for reads.
        loop: the control's.
        on_cleared: as `on_written`, for each `submit_clear`.
        clock_s: a clock that never goes back.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[TierOptions, Tier]],
        pool: PoolRegion,
        on_written: OnWritten,
        on_read: OnRead,
        loop: asyncio.AbstractEventLoop,
        *,
        on_cleared: OnCleared = _nobody,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        memory = PoolMemory(pool)
        self._on_written = on_written
        self._on_read = on_read
        self._on_cleared = on_cleared
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._lanes = {
            tier.name: TierLanes(
                options,
                tier,
                memory,
                partial(self._to_loop, self._written, tier.name),
                partial(self._to_loop, self._was_read, tier.name),
                clock_s,
            )
            for options, tier in tiers
        }

    def submit_write(self, copy_id: int, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        """Write blocks of the pool to a tier.

        Args:
            copy_id: of no other copy in progress, read or write.
            tier: its name.
            blocks: key and block id of each; held, and changed by nobody, until it has ended.
        """
        self._lanes[tier].writes.submit(Copy(copy_id, tuple(blocks)))
        self._look_later()

    def submit_read(self, copy_id: int, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        """Read blocks of a tier into the pool; parameters as for `submit_write`.

        The destinations are held, and read by nobody, until it has ended.
        """
        self._lanes[tier].reads.submit(Copy(copy_id, tuple(blocks)))
        self._look_later()

    def submit_clear(self, tier: str) -> None:
        """Drop all that a tier has, while none of its copies is in progress."""
        self._lanes[tier].clear(partial(self._to_loop, self._was_cleared, tier))

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """What happened so far, by tier and name; see `TierLanes.counts`."""
        return {name: lanes.counts() for name, lanes in self._lanes.items()}

    def close(self, timeout_s: float) -> bool:
        """Stop, and report nothing from now on; blocks, so call it from a thread.

        Returns:
            False when a copy is still being carried: then end the process before anything else
            happens to the pool.
        """
        self._closed = True
        end_s = time.monotonic() + timeout_s
        ended = [lanes.close(max(0.0, end_s - time.monotonic())) for lanes in self._lanes.values()]
        return all(ended)

    # --- from the threads to the loop

    def _to_loop(self, ended: Callable[[str, End], None], tier: str, end: End) -> None:
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # a loop that is closed needs no news
                self._loop.call_soon_threadsafe(ended, tier, end)

    def _written(self, tier: str, copy: Copy) -> None:
        self._lanes[tier].count_end(copy, "written", "not_written")
        evicted = set(copy.evicted)
        keys = (key for (key, _), good in zip(copy.blocks, copy.good, strict=True) if good)
        stored = tuple(key for key in keys if key not in evicted)
        if not self._closed:
            self._on_written(copy.copy_id, stored, tuple(copy.evicted), copy.error)

    def _was_read(self, tier: str, copy: Copy) -> None:
        self._lanes[tier].count_end(copy, "read", "missed")
        if not self._closed:
            self._on_read(copy.copy_id, tuple(copy.good))

    def _was_cleared(self, tier: str, error: str) -> None:
        if not self._closed:
            self._on_cleared(tier, error)

    # --- looking

    def _look_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        lanes = [lane for both in self._lanes.values() for lane in (both.writes, both.reads)]
        for lane in lanes:
            lane.look()
        if any(lane.is_busy for lane in lanes):
            self._look_later()
