"""A third engine: as little as one can be, with KV that are bytes in a region."""

from collections.abc import Iterator

import numpy as np

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.sampling import SampledToken
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.engine_steps import EngineSteps
from disagg.scheduling.step import SequenceSlice, Step, StepResult
from disagg.testing.simulation.symbolic_kinds import digest_of
from disagg.workers.pool_region import PoolRegion

BLOCK_TOKENS = 4
VOCAB_SIZE = 997
UNWRITTEN = -1


class DigestEngine:
    """A token's KV in a group is a digest of all that it was computed from; see `Engine`."""

    fingerprint = "digest"
    dtype = "none"
    page_format = "digests"
    summary = "nothing of this machine"
    max_model_tokens = 512

    def __init__(self, num_blocks: int) -> None:
        shape = {"block_tokens": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype_bytes": 4}
        self.layout = plan_layout(
            [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, window_tokens=6)]
        )
        self._cells = np.full((num_blocks, self.layout.block_bytes // 8), UNWRITTEN)
        self.region = PoolRegion(
            address=self._cells.ctypes.data,
            num_blocks=num_blocks,
            block_bytes=self.layout.block_bytes,
            memory_kind="DRAM",
            device_id=0,
            owner=self._cells,
        )
        self._steps = EngineSteps(self._lay_out, self._compute, (LookupError, ValueError))
        self._tables = BlockTables(len(self.layout.groups), num_blocks)

    def prepare(self, step: Step) -> None:
        self._steps.prepare(step)

    def run(self, step: Step) -> StepResult:
        return self._steps.run(step)

    def _lay_out(self, step: Step) -> None:
        """Nothing: its tables are kept in the order of computing."""

    def _compute(self, _: None, step: Step) -> list[SampledToken | None]:
        self._tables.apply(step)
        return [self._run(part) for part in step.slices]

    def _run(self, part: SequenceSlice) -> SampledToken | None:
        digest = 0
        for position, token in enumerate(part.token_ids, part.start):
            seen = tuple(sum(self._seen(part, group, position)) for group in (0, 1))
            digest = digest_of(token, seen)
            for group in (0, 1):
                self._cells[self._place(part, group, position)] = digest
        return None if part.sampling is None else SampledToken(digest % VOCAB_SIZE)

    def _seen(self, part: SequenceSlice, group: int, position: int) -> Iterator[int]:
        first = self.layout.groups[group].spec.first_seen(position)
        assert first is not None
        for at in range(first, position):
            cell = int(self._cells[self._place(part, group, at)])
            if cell == UNWRITTEN:
                raise ValueError(f"group {group} has nothing at position {at}")
            yield cell

    def _place(self, part: SequenceSlice, group: int, position: int) -> tuple[int, int]:
        block_index, offset = divmod(position, BLOCK_TOKENS)
        block = self._tables[part.key][group][block_index]
        if block == NULL_BLOCK:
            raise ValueError(f"group {group} is null at position {position}")
        return block, offset
