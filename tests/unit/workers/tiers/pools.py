"""A pool as copies see it, and a tier that does what it is told."""

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from disagg.scheduling.actions import TierKey
from disagg.workers.pool_region import PoolRegion
from disagg.workers.tiers.protocol import Written
from tests.unit.workers.tiers.stored_blocks import BLOCK_BYTES

WAIT_S = 30.0


class Pool:
    """Blocks in this process's memory, in one or several parts."""

    def __init__(self, num_blocks: int, num_parts: int = 1) -> None:
        self.memory = np.zeros((num_parts, num_blocks, BLOCK_BYTES // num_parts), np.uint8)
        self.region = PoolRegion(
            self.memory.ctypes.data,
            num_blocks,
            BLOCK_BYTES,
            "DRAM",
            0,
            self.memory,
            num_parts,
        )

    def fill(self, block: int, content: bytes) -> None:
        parts = np.frombuffer(content, np.uint8).reshape(len(self.memory), -1)
        self.memory[:, block] = parts

    def content(self, block: int) -> bytes:
        return self.memory[:, block].tobytes()


class ScriptedTier:
    """A tier in a dict, whose calls wait, fail or lie when told to."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        self.capacity_bytes = 1 << 20
        self.blocks: dict[TierKey, bytes] = {}
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: Exception | None = None
        self.answer: tuple[bool, ...] | None = None
        self.gives_up: tuple[TierKey, ...] = ()
        self.num_calls = 0
        self.is_closed = False

    def known(self) -> Sequence[TierKey]:
        return tuple(self.blocks)

    def write(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> Written:
        self._enter()
        self.blocks.update((key, bytes(view)) for key, view in blocks)
        return Written(tuple(key for key, _ in blocks), self.gives_up)

    def read(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> tuple[bool, ...]:
        self._enter()
        for key, view in blocks:
            view[:] = self.blocks.get(key, b"\xee" * len(view))
        return self.answer or tuple(key in self.blocks for key, _ in blocks)

    def forget(self, keys: Sequence[TierKey]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def clear(self) -> None:
        self._enter()
        self.blocks.clear()

    def counts(self) -> Mapping[str, int]:
        return {"calls": self.num_calls}

    def close(self) -> None:
        self.is_closed = True

    def _enter(self) -> None:
        self.num_calls += 1
        self.entered.release()
        assert self.may_go.wait(WAIT_S)
        if self.error is not None:
            raise self.error
