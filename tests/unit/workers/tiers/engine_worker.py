"""One worker core over the native engine and real tiers, in this process."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from disagg.messages.outputs import SequenceOutput
from disagg.scheduling.actions import ReadTier, TierKey, WorkerAction, WriteTier
from disagg.scheduling.stats import check_core
from disagg.scheduling.step import Step
from disagg.workers.announcement import contract_of
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.tiers.copies import TierCopies
from disagg.workers.tiers.host_tier import HostTier
from disagg.workers.tiers.kinds import open_tiers
from disagg.workers.tiers.known import known_to_core
from tests.unit.scheduling.tiers.tiered_worker import TieredWorker

WAIT_S = 300.0
Blocks = Counter[tuple[str, int]]
"""By name of the tier, and by group."""


class EngineWorker(TieredWorker):
    """Runs steps here, while threads copy; no step ends before what is being copied has.

    Attributes:
        written: blocks that tiers took.
        read: blocks that tiers were asked for.
        during: of each step, where its first sequence's slice began, and what had been written when
            it had been computed but had not ended.
    """

    num_logprobs = 2

    def __init__(
        self, directory: Path, num_blocks: int, block_tokens: int, max_step_tokens: int, *tiers: str
    ) -> None:
        self.native = NativeEngine(directory, num_blocks=num_blocks, block_tokens=block_tokens)
        contract = contract_of(self.native, self.native.layout, b"tiers")
        opened = open_tiers(tiers, contract)
        super().__init__(
            self.native.layout,
            num_blocks,
            *known_to_core(opened, contract),
            max_step_tokens=max_step_tokens,
            max_model_tokens=self.native.max_model_tokens,
            at_once=False,
        )
        self._tiers = [tier for _, tier in opened]
        self.written, self.read = Blocks(), Blocks()
        self.during: list[tuple[int, Blocks]] = []
        self._loop = asyncio.new_event_loop()
        self._idle = asyncio.Event()
        self._under_way: dict[int, WriteTier | ReadTier] = {}
        self._copies = TierCopies(
            opened, self.native.region, self._was_written, self._was_read, self._loop
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._copies.close(WAIT_S)
        self._loop.close()

    def serve(self, prompt: tuple[int, ...], num_tokens: int) -> list[SequenceOutput]:
        """Serve a prompt to its end, alone."""
        key = self.submit(prompt, num_tokens)
        self.run()
        assert key not in self.core.sequences
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
        return self.outputs(key)

    def run(self) -> None:
        while True:
            if (step := self.step()) is not None:
                self.end(step)
            elif self._under_way:
                self._settle()
            else:
                return

    def end(self, step: Step) -> None:
        result = self.native.run(step)
        assert not result.error, result.error
        self._settle()
        self.during.append((step.slices[0].start, Blocks(self.written)))
        self.perform(self.core.on_step_done(self.now_ms, result))
        check_core(self.core)

    def perform(self, actions: list[WorkerAction]) -> None:
        super().perform(actions)
        copies, self.copies = self.copies, []
        for copy in copies:
            self._under_way[copy.copy_id] = copy
            if isinstance(copy, WriteTier):
                self._copies.submit_write(copy.copy_id, copy.tier, copy.blocks)
            else:
                self.read.update((copy.tier, key[0]) for key, _ in copy.blocks)
                self._copies.submit_read(copy.copy_id, copy.tier, copy.blocks)

    def store_counts(self, tier: str) -> Mapping[str, int]:
        """What a tier has counted by itself."""
        return self._copies.counts()[tier]

    def host_memory(self) -> np.ndarray:
        """What the tier in host memory keeps, to be changed behind its back."""
        (tier,) = (tier for tier in self._tiers if isinstance(tier, HostTier))
        return tier._slots

    # --- what the threads report

    def _settle(self) -> None:
        """Hear of the ends of copies until there are none under way."""

        async def wait() -> None:
            while self._under_way:
                self._idle.clear()
                await asyncio.wait_for(self._idle.wait(), WAIT_S)

        self._loop.run_until_complete(wait())

    def _was_written(
        self, copy_id: int, stored: tuple[TierKey, ...], evicted: tuple[TierKey, ...], error: str
    ) -> None:
        assert not error
        tier = self._under_way.pop(copy_id).tier
        self.written.update((tier, key[0]) for key in stored)
        self.perform(self.core.on_tier_written(self.now_ms, copy_id, stored, evicted))
        self._idle.set()

    def _was_read(self, copy_id: int, intact: tuple[bool, ...]) -> None:
        del self._under_way[copy_id]
        self.perform(self.core.on_tier_read(self.now_ms, copy_id, intact))
        self._idle.set()
