"""The blocks of a worker's pool as tiers take them: host memory, one range a block."""

import ctypes
from collections.abc import Sequence

import torch

from disagg.workers.pool_region import PoolRegion


class PoolMemory:
    """A pool's blocks, lent as they lie, or by way of a buffer where they do not lie so.

    Blocks in one part of host memory are lent themselves: a tier reads right into the pool. Where
    a block lies in several parts, or on a GPU, it is copied through a buffer of `staging`.

    Args:
        region: the pool; of several ranks, the part of the one whose process this is.
    """

    def __init__(self, region: PoolRegion) -> None:
        self.block_bytes = region.block_bytes
        self.num_blocks = region.num_blocks
        self._region = region  # keeps the memory alive
        self._on_gpu = region.memory_kind == "VRAM"
        num_bytes = region.num_blocks * region.block_bytes
        memory: torch.Tensor
        if self._on_gpu:
            memory = torch.as_tensor(
                _CudaMemory(region.address, num_bytes), device=f"cuda:{region.device_id}"
            )
        else:
            raw = (ctypes.c_uint8 * num_bytes).from_address(region.address)
            self._view = memoryview(raw).cast("B")
            memory = torch.frombuffer(raw, dtype=torch.uint8)
        parts = memory.view(region.num_parts, region.num_blocks, region.part_bytes)
        self._blocks = parts.transpose(0, 1)  # [num_blocks, num_parts, part_bytes]

    @property
    def lends(self) -> bool:
        """Whether blocks are lent as they lie; else each thread needs a buffer of `staging`."""
        return not self._on_gpu and self._region.num_parts == 1

    def view(self, block: int) -> memoryview:
        """A block itself, where the pool lends."""
        self._check(block)
        return self._view[block * self.block_bytes : (block + 1) * self.block_bytes]

    def staging(self, num_blocks: int) -> torch.Tensor:
        """A buffer for so many blocks; in memory that the GPU reads by itself, if there is one."""
        shape = (num_blocks, *self._blocks.shape[1:])
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._on_gpu)

    def fetch(self, blocks: Sequence[int], staging: torch.Tensor) -> list[memoryview]:
        """Copy blocks into the buffer; returns where each lies."""
        views = self.views(len(blocks), staging)
        self._copy([(staging[i], self._block(block)) for i, block in enumerate(blocks)])
        return views

    def views(self, num_blocks: int, staging: torch.Tensor) -> list[memoryview]:
        """The first blocks of a buffer."""
        flat = staging.view(-1).numpy().data
        size = self.block_bytes
        return [flat[i * size : (i + 1) * size] for i in range(num_blocks)]

    def place(self, blocks: Sequence[tuple[int, int]], staging: torch.Tensor) -> None:
        """Copy from the buffer into the pool: ``(place in the buffer, block)`` each."""
        self._copy([(self._block(block), staging[i]) for i, block in blocks])

    def _block(self, block: int) -> torch.Tensor:
        self._check(block)
        return self._blocks[block]

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} of {self.num_blocks}")

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each second into its first; returns when all have arrived."""
        if not self._on_gpu:
            for to, source in pairs:
                to.copy_(source)
            return
        stream = torch.cuda.Stream(self._region.device_id)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        stream.synchronize()


class _CudaMemory:
    """Memory of a GPU by its address, as torch takes it over without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
