"""What the native engine says of its pages, against the views that it computes through."""

from dataclasses import replace

import pytest
import torch

from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.messages.registration import Contract
from disagg.transfer.read_plan import ReadPlan, plan_reads
from disagg.workers.engines.forms import group_forms
from disagg.workers.engines.native.paged_pool import PagedPool
from disagg.workers.engines.native.sections import sections_of
from disagg.workers.engines.native.state_cache import StateShape, place_states

Cells = list[tuple[list[int], list[int]]]
NUM_BLOCKS = 40
CONTRACT = Contract("m", "float32", (), "native", 1, 4, "h", 1, 1)
STATE = StateShape((6, 3), (2, 4, 5))
STATE_BYTES = (6 * 3 + 2 * 4 * 5) * 4


def specs(kinds: str, tokens: int) -> list[Spec]:
    shape = (tokens, 2, 4, 4)
    full = FullAttentionSpec(*shape)
    by_name: dict[str, list[Spec]] = {
        "hybrid": [full, *[SlidingWindowSpec(*shape, 9)] * 5, full],
        "chunks": [ChunkedLocalSpec(*shape, 8)] * 3 + [full],
        "latents": [MLASpec(tokens, 1, 12, 4)] * 3,
        "unequal heads": [
            FullAttentionSpec(tokens, 4, 4, 4),
            SlidingWindowSpec(tokens, 2, 4, 4, 9),
        ],
        "states": [full, *[LinearStateSpec(tokens, STATE_BYTES)] * 3],
    }
    return by_name[kinds]


def layout_of(kinds: str, tokens: int) -> KVCacheLayout:
    return replace(plan_layout(specs(kinds, tokens)), hash_block_tokens=4)


def contract_of(layout: KVCacheLayout) -> Contract:
    return replace(
        CONTRACT,
        groups=tuple(map(str, layout.groups)),
        block_bytes=layout.block_bytes,
        forms=group_forms(layout, sections_of),
    )


def pool_of(layout: KVCacheLayout) -> PagedPool:
    pool = PagedPool(layout, num_blocks=NUM_BLOCKS, dtype=torch.float32, device=torch.device("cpu"))
    pool.tensor.zero_()
    return pool


def copied(plan: ReadPlan, group: int, cells: Cells, source: PagedPool, target: PagedPool) -> None:
    for one in plan.reads(group, cells):
        part = source.tensor[one.src_block, one.src_offset : one.src_offset + one.num_bytes]
        target.tensor[one.dst_block, one.dst_offset : one.dst_offset + one.num_bytes] = part


@pytest.mark.parametrize(("ours", "theirs"), [(4, 8), (8, 4), (16, 4)])
@pytest.mark.parametrize("kinds", ["hybrid", "chunks", "latents", "unequal heads", "states"])
def test_every_token_of_every_layer_arrives(kinds: str, ours: int, theirs: int) -> None:
    torch.manual_seed(0)
    reader, owner = layout_of(kinds, ours), layout_of(kinds, theirs)
    plan = plan_reads(contract_of(owner), contract_of(reader))
    assert plan is not None
    source, target = pool_of(owner), pool_of(reader)
    source.tensor.view(torch.float32).normal_()
    for group, reads in enumerate(plan.groups):
        theirs_at = torch.randperm(NUM_BLOCKS - 1)[: reads.src_blocks] + 1
        ours_at = torch.randperm(NUM_BLOCKS - 1)[: reads.dst_blocks] + 1
        copied(plan, group, [(theirs_at.tolist(), ours_at.tolist())], source, target)
        for layer in reader.groups[group].layers:
            if reads.is_state:
                states = [
                    place_states(layout, pool.tensor, layer, STATE, torch.float32)
                    for layout, pool in ((owner, source), (reader, target))
                ]
                for name in ("conv", "recurrent"):
                    theirs_is, ours_is = (
                        getattr(state, name).read(at[None])
                        for state, at in zip(states, (theirs_at, ours_at), strict=True)
                    )
                    assert theirs_is.abs().sum() > 0
                    assert torch.equal(theirs_is, ours_is)
                continue
            for name in ("keys", "values"):
                views = [getattr(pool.layers[layer], name) for pool in (source, target)]
                theirs_is, ours_is = (
                    view[at].transpose(0, 1).flatten(1, 2)  # [heads, tokens, head_size]
                    for view, at in zip(views, (theirs_at, ours_at), strict=True)
                )
                assert theirs_is.abs().sum() > 0
                assert torch.equal(theirs_is, ours_is)


def test_kinds_of_unequal_blocks_per_state_are_among_them() -> None:
    sizes = [layout_of("states", tokens).groups[1].blocks_per_state for tokens in (4, 8, 16)]
    assert len(set(sizes)) == 3
