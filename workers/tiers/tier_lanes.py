"""One tier's threads: what they do with a piece of a copy, and what they count."""

import threading
import time
from collections.abc import Callable, Mapping

import torch

from disagg.workers.tiers.copy_lane import Copy, CopyLane, Piece
from disagg.workers.tiers.counts import Counts
from disagg.workers.tiers.options import TierOptions
from disagg.workers.tiers.pool_memory import PoolMemory
from disagg.workers.tiers.protocol import Tier

PIECE_BYTES = 8 << 20
"""One thread carries so much at a time, or one block: much for a call, little for who waits."""
WAITING_BYTES_MAX = 1 << 30
"""Of blocks that wait for one tier in one direction; they are held while they wait."""
WRITER_NICENESS = 10
"""Nobody waits for a write; steps need the cores more."""


class TierLanes:
    """A lane to a tier and one from it; neither waits for the other.

    Args:
        options: of the tier.
        tier: the tier itself, closed with this object.
        memory: the pool's blocks.
        on_written: takes each write that has ended, see `CopyLane`.
        on_read: takes each read that has ended.
        clock_s: a clock that never goes back.
    """

    def __init__(
        self,
        options: TierOptions,
        tier: Tier,
        memory: PoolMemory,
        on_written: Callable[[Copy], None],
        on_read: Callable[[Copy], None],
        clock_s: Callable[[], float],
    ) -> None:
        self.tier = tier
        self._memory = memory
        self._counts = Counts(tier.name)
        self._clearing: threading.Thread | None = None
        self._buffers = threading.local()
        self._piece_blocks = max(1, PIECE_BYTES // memory.block_bytes)
        blocks_max = max(1, WAITING_BYTES_MAX // memory.block_bytes)

        def lane(
            direction: str,
            num_threads: int,
            carry: Callable[[Piece], None],
            on_end: Callable[[Copy], None],
            niceness: int = 0,
        ) -> CopyLane:
            return CopyLane(
                f"tier-{tier.name}-{direction}",
                num_threads,
                carry,
                on_end,
                blocks_max=blocks_max,
                piece_blocks_max=self._piece_blocks,
                niceness=niceness,
                slow_s=options.slow_ms / 1e3,
                clock_s=clock_s,
            )

        num_writers = -(-options.num_threads // 2)
        self.writes = lane("write", num_writers, self._write, on_written, WRITER_NICENESS)
        self.reads = lane("read", options.num_threads, self._read, on_read)

    def clear(self, on_end: Callable[[str], None]) -> None:
        """Drop all that the tier has, on a thread; ``on_end`` takes why some may be left, or ""."""

        def run() -> None:
            try:
                self.tier.clear()
            except Exception as error:
                self._counts.mishap("not_cleared", repr(error))
                on_end(repr(error))
            else:
                self._counts.add("cleared")
                on_end("")

        self._clearing = threading.Thread(
            target=run, name=f"tier-{self.tier.name}-clear", daemon=True
        )
        self._clearing.start()

    def count_end(self, copy: Copy, arrived: str, missing: str) -> None:
        """Count the blocks of a copy that has ended, and say why some are missing."""
        num_good = sum(copy.good)
        self._counts.add(arrived, num_good)
        self._counts.add(missing, len(copy.good) - num_good)
        if copy.error:
            self._counts.mishap(copy.error.partition("(")[0].replace(" ", "_"), copy.error)

    def counts(self) -> Mapping[str, int]:
        """What was copied, in blocks and microseconds of threads, and what the tier counted."""
        return {**self.tier.counts(), **self._counts.as_dict()}

    def close(self, timeout_s: float) -> bool:
        """End both lanes, then the tier; False, and the tier stays, if a copy does not end."""
        end_s = time.monotonic() + timeout_s
        ended = [
            lane.close(max(0.0, end_s - time.monotonic())) for lane in (self.writes, self.reads)
        ]
        if self._clearing is not None:
            self._clearing.join(max(0.0, end_s - time.monotonic()))
            ended.append(not self._clearing.is_alive())
        if all(ended):
            self.tier.close()
        return all(ended)

    # --- on the threads

    def _write(self, piece: Piece) -> None:
        copy, first, end = piece
        began_ns = time.perf_counter_ns()
        keys = [key for key, _ in copy.blocks[first:end]]
        blocks = [block for _, block in copy.blocks[first:end]]
        if self._memory.lends:
            views = [self._memory.view(block) for block in blocks]
        else:
            views = self._memory.fetch(blocks, self._buffer())
        written = self.tier.write(
            [(key, view.toreadonly()) for key, view in zip(keys, views, strict=True)]
        )
        stored = set(written.stored) - set(written.evicted)
        copy.good[first:end] = [key in stored for key in keys]
        copy.evicted += written.evicted
        self._counts.add("write_us", (time.perf_counter_ns() - began_ns) // 1000)

    def _read(self, piece: Piece) -> None:
        copy, first, end = piece
        began_ns = time.perf_counter_ns()
        keys = [key for key, _ in copy.blocks[first:end]]
        blocks = [block for _, block in copy.blocks[first:end]]
        if self._memory.lends:
            views = [self._memory.view(block) for block in blocks]
        else:
            views = self._memory.views(len(blocks), self._buffer())
        intact = self.tier.read(list(zip(keys, views, strict=True)))
        if len(intact) != len(blocks):
            raise ValueError(f"{len(intact)} answers to {len(blocks)} blocks")
        if not self._memory.lends:
            self._memory.place(
                [(i, block) for i, block in enumerate(blocks) if intact[i]], self._buffer()
            )
        copy.good[first:end] = [good is True for good in intact]
        self._counts.add("read_us", (time.perf_counter_ns() - began_ns) // 1000)

    def _buffer(self) -> torch.Tensor:
        """This thread's buffer, made when it is first needed."""
        if not hasattr(self._buffers, "tensor"):
            self._buffers.tensor = self._memory.staging(self._piece_blocks)
        tensor: torch.Tensor = self._buffers.tensor
        return tensor
