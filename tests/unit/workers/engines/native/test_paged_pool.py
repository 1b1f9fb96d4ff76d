"""The pool is one tensor; layer views alias it, page by page, K before V, heads before tokens."""

import mmap

import pytest
import torch

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.workers.engines.native.paged_pool import PagedPool

HEADS, TOKENS, HEAD_SIZE = 2, 4, 8


def layout(dtype_bytes: int = 4) -> KVCacheLayout:
    full = FullAttentionSpec(TOKENS, HEADS, HEAD_SIZE, dtype_bytes)
    window = SlidingWindowSpec(TOKENS, HEADS, HEAD_SIZE, dtype_bytes, 16)
    return plan_layout([window, window, full, window, window, full])


def pool(dtype: torch.dtype = torch.float32) -> PagedPool:
    return PagedPool(layout(dtype.itemsize), num_blocks=5, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_of_a_page_belongs_to_one_view_element(dtype: torch.dtype) -> None:
    made = pool(dtype)
    for number, layer in made.layers.items():
        offset = made.layout.page_offset(number)
        half = HEADS * TOKENS * HEAD_SIZE * dtype.itemsize
        for view, first in ((layer.keys, offset), (layer.values, offset + half)):
            assert view.shape == (5, HEADS, TOKENS, HEAD_SIZE)
            for block in (1, 4):
                made.tensor.zero_()
                view[block, 1, 2, 3] = 1
                touched = made.tensor.nonzero()
                element = ((1 * TOKENS + 2) * HEAD_SIZE + 3) * dtype.itemsize
                assert set(touched[:, 0].tolist()) == {block}
                bytes_ = range(first + element, first + element + dtype.itemsize)
                assert set(touched[:, 1].tolist()) <= set(bytes_)


def test_views_share_the_tensor_and_layers_of_a_group_do_not_overlap() -> None:
    made = pool()
    made.tensor.zero_()
    for number, layer in made.layers.items():
        layer.keys[3] = number + 1
        layer.values[3] = -(number + 1)
    for group in made.layout.groups:
        last = [layer for layer in made.layers.values() if layer.group == group.group]
        assert len(last) == len(group.layers)
    # Groups share block 3, so the last group to write wins; its own layers stay apart.
    final = made.layout.groups[made.layers[max(made.layers)].group]
    for number in final.layers:
        assert bool((made.layers[number].keys[3] == number + 1).all())
        assert bool((made.layers[number].values[3] == -(number + 1)).all())
    start = made.tensor.data_ptr()
    for layer in made.layers.values():
        assert start <= layer.keys.data_ptr() < start + made.tensor.nbytes


def test_host_memory_is_page_aligned_and_the_null_block_is_nan() -> None:
    made = pool()
    assert made.tensor.data_ptr() % mmap.PAGESIZE == 0
    assert made.tensor.shape == (5, made.layout.block_bytes)
    assert made.tensor.is_contiguous()
    for layer in made.layers.values():
        assert bool(layer.keys[NULL_BLOCK].isnan().all())
        assert bool(layer.values[NULL_BLOCK].isnan().all())
        assert not bool(layer.keys[1:].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan_in_the_named_blocks_only(dtype: torch.dtype) -> None:
    made = pool(dtype)
    made.tensor[1:] = 0
    made.poison([2, 4])
    nan_blocks = made.layers[0].values.isnan().all(dim=(1, 2, 3)).tolist()
    assert nan_blocks == [True, False, True, False, True]


def test_a_layout_for_other_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match="4-byte"):
        PagedPool(layout(4), num_blocks=5, dtype=torch.float16, device=torch.device("cpu"))


def test_a_kind_without_pages_is_refused() -> None:
    outputs = plan_layout([CrossAttentionSpec(16, HEADS, HEAD_SIZE, 4, 64)])
    with pytest.raises(ConfigError, match="cross_attention"):
        PagedPool(outputs, num_blocks=5, dtype=torch.float32, device=torch.device("cpu"))
