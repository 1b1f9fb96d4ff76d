"""The KV memory of one worker: one tensor, and each layer's views of it."""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.kind import AttentionPages, Spec, keeps_states
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.workers.pool_region import PoolRegion

_never_freed: list[torch.Tensor] = []
# A peer's READ can land in the memory after its handle was released, and an owner that unmaps
# memory under a READ dies on some transports: a pool therefore lives as long as its process.


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's part of every block.

    Attributes:
        keys, values: views [num_blocks, num_kv_heads, block_tokens, head_size] of the pool; of
            latents one and the same.
        head_pages: view [rows, block_tokens * head_size] of the whole pool, a row being one head's
            K or V in one block; the fastest way to gather many.
        head_pages_per_block: distance of a block's rows to those of the next block.
        first_head_page: row of the layer's first K head in block 0; its V heads follow its K heads.
        group: index of the layer's KV cache group.
        sliding_window: what the model calls so; None where its attention layers name none.
        is_latent: there is one latent per token instead of K and V.
        is_shared: the layer reads what another layer wrote, and writes nothing.
    """

    keys: torch.Tensor
    values: torch.Tensor
    head_pages: torch.Tensor
    head_pages_per_block: int
    first_head_page: int
    group: int
    sliding_window: int | None
    is_latent: bool = False
    is_shared: bool = False


class PagedPool:
    """All KV of a worker as an int8 tensor ``[num_blocks, block_bytes]``.

    Host memory starts at a page boundary and is committed at once: a READ that is the first to
    touch its pages took 25 times as long as later ones, and slowed the engine's steps meanwhile.
    The memory is never freed or moved while the process lives. ``layers`` has the views of every
    layer with K and V, by its number in the layout.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_owners: Mapping[int, int] | None = None,
    ) -> None:
        """Allocate the memory; ``kv_owners`` names for layers without KV the layer they read."""
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks={num_blocks}: the null block and one more are the least",
                param="num_blocks",
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = _allocate(num_blocks, layout.block_bytes, device)
        self.region = region_of(self.tensor)
        _never_freed.append(self.tensor)
        self.layers = self._views(dtype)
        for layer, owner in (kv_owners or {}).items():
            self.layers[layer] = replace(self.layers[owner], is_shared=True)
        self.poison([NULL_BLOCK])

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a read of what nobody wrote fails the step.

        All bits set is NaN in every floating type the engine has.
        """
        ids = torch.tensor(list(block_ids), dtype=torch.long, device=self.tensor.device)
        self.tensor[ids] = -1

    def _views(self, dtype: torch.dtype) -> dict[int, LayerCache]:
        views: dict[int, LayerCache] = {}
        for group in self.layout.groups:
            if keeps_states(group.spec):
                continue
            pages = pages_of(group.spec)
            if pages.dtype_bytes != dtype.itemsize:
                raise ConfigError(
                    f"layout for {pages.dtype_bytes}-byte elements, dtype is {dtype}", param="dtype"
                )
            typed = self.tensor.view(dtype)
            shape = (self.num_blocks, pages.num_kv_heads, pages.block_tokens, pages.head_size)
            head_page = pages.block_tokens * pages.head_size
            half = pages.num_kv_heads * head_page
            of_values = half if pages.has_values else 0
            for layer in group.layers:
                first = self.layout.page_offset(layer) // dtype.itemsize
                if first % head_page or typed.shape[1] % head_page:
                    raise ConfigError(
                        f"layer {layer}: its page is not aligned to its heads", param="groups"
                    )
                views[layer] = LayerCache(
                    keys=typed[:, first : first + half].view(shape),
                    values=typed[:, first + of_values : first + of_values + half].view(shape),
                    head_pages=typed.view(-1, head_page),
                    head_pages_per_block=typed.shape[1] // head_page,
                    first_head_page=first // head_page,
                    group=group.group,
                    sliding_window=pages.sliding_window,
                    is_latent=not pages.has_values,
                )
        return views


def pages_of(spec: Spec) -> AttentionPages:
    """Return a spec's pages as the attention kernels read them.

    Raises:
        ConfigError: the engine cannot compute this kind.
    """
    pages = spec.attention_pages()
    if pages is None:
        raise ConfigError(f"the engine has no pages of kind {spec.kind}", param="groups")
    return pages


def region_of(tensor: torch.Tensor) -> PoolRegion:
    """Describe an int8 tensor ``[num_blocks, block_bytes]`` to a transport.

    Raises:
        ConfigError: it is another kind of tensor.
    """
    if tensor.dtype != torch.int8 or tensor.dim() != 2 or not tensor.is_contiguous():
        raise ConfigError("the pool is not a contiguous int8 [num_blocks, block_bytes] tensor")
    return PoolRegion(
        address=tensor.data_ptr(),
        num_blocks=tensor.shape[0],
        block_bytes=tensor.shape[1],
        memory_kind="VRAM" if tensor.is_cuda else "DRAM",
        device_id=tensor.get_device() if tensor.is_cuda else 0,
        owner=tensor,
    )


def _allocate(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty((num_blocks, block_bytes), dtype=torch.int8, device=device)
    # Private, not mmap's default of shared: a fork must not write into this worker's KV.
    memory = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # READs over shared memory then move 1.5 times as much
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8).view(num_blocks, block_bytes).zero_()
