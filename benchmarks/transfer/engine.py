"""A stand-in for the engine of a benchmark's node: bytes that can be compared, time that passes."""

import time
from collections.abc import Hashable

import torch

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import SequenceSlice, Step, StepResult
from disagg.workers.engines.native.paged_pool import PagedPool


class PacedEngine:
    """Writes each block of a step with its own number, then sleeps until the time is up."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        *,
        tokens_per_s: float,
        writes: bool,
        device: str = "cpu",
    ) -> None:
        self.layout = layout
        spec = layout.groups[0].spec
        assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
        dtype = {2: torch.bfloat16, 4: torch.float32}[spec.dtype_bytes]
        where = torch.device(device)
        self.pool = PagedPool(layout, num_blocks=num_blocks, dtype=dtype, device=where).tensor
        self._tokens_per_s = tokens_per_s
        self._writes = writes
        self._tables = BlockTables(len(layout.groups), num_blocks)

    def prepare(self, step: Step) -> None:
        """Nothing is prepared."""

    def run(self, step: Step) -> StepResult:
        """Compute nothing, but leave bytes and use up the time."""
        begin_s = time.monotonic()
        self._tables.apply(step)
        num_tokens = 0
        for part in step.slices:
            num_tokens += len(part.token_ids)
            if self._writes:
                self._write(part)
        if self.pool.is_cuda:
            torch.cuda.synchronize()  # a step that has ended has written, as with real engines
        if self._tokens_per_s:
            rest_s = begin_s + num_tokens / self._tokens_per_s - time.monotonic()
            time.sleep(max(0.0, rest_s))
        sampled = (None if part.sampling is None else SampledToken(1) for part in step.slices)
        return StepResult(step.step_id, tuple(sampled))

    def _write(self, part: SequenceSlice) -> None:
        end = part.start + len(part.token_ids)
        for group, table in zip(self.layout.groups, self._tables[part.key], strict=True):
            size = group.spec.block_tokens
            for block_index in range(part.start // size, -(-end // size)):
                if table[block_index] != NULL_BLOCK:
                    number = number_of(part.key, group.group, block_index)
                    words(self.pool)[table[block_index]].fill_(number)


def words(pool: torch.Tensor) -> torch.Tensor:
    """The pool as 64-bit words, a row per block."""
    return pool.view(torch.int64)


def number_of(key: Hashable, group: int, block_index: int) -> int:
    """What a block of a request holds in every word; different for each."""
    assert isinstance(key, RequestKey)
    return int(key.request_id) << 40 | group << 32 | block_index
