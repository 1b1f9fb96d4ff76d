"""What the vLLM engine says of its pages: heads apart, tokens and states together."""

import pytest

from disagg.errors import ConfigError
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec, keeps_states
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheGroup
from disagg.kv.shapes.whole_states import plan_whole_states
from disagg.messages.forms import Section
from disagg.messages.registration import Contract
from disagg.transfer.read_plan import ByteRange, plan_reads
from disagg.workers.engines.forms import group_forms

pytestmark = pytest.mark.vllm

HALF = 8192
"""Bytes of one head's K and V in a block."""


def contract(
    num_ranks: int, *, states: bool = False, block_tokens: int = 32, backend: str = "CPU_ATTN"
) -> Contract:
    """Of a model with two KV heads."""
    from disagg.workers.engines.vllm.kv_layout import RankHeads, sections_of

    shape = (block_tokens, 2 // num_ranks, 32, 4)
    specs: list[Spec] = [FullAttentionSpec(*shape), SlidingWindowSpec(*shape, 40)]
    specs += [LinearStateSpec(block_tokens, 4096 // num_ranks)] * states

    def sections(group: KVCacheGroup) -> tuple[Section, ...]:
        backends = set() if keeps_states(group.spec) else {backend}
        return sections_of(group, "LBHNC", 1, backends, RankHeads(num_ranks, 2))

    layout = plan_whole_states(specs)
    return Contract(
        "m",
        "float32",
        tuple(map(str, layout.groups)),
        "vllm",
        layout.block_bytes,
        32,
        "h",
        1,
        1,
        num_ranks,
        group_forms(layout, sections),
    )


def test_two_ranks_read_their_heads_of_one_and_back() -> None:
    apart, together = (
        plan_reads(contract(owner), contract(reader)) for owner, reader in ((1, 2), (2, 1))
    )
    assert apart is not None
    assert together is not None
    for number in (0, 1):
        assert apart.groups[number].ranges == {
            (0, 0): (ByteRange(0, 0, 0, 0, HALF), ByteRange(0, HALF, 1, 0, HALF))
        }
        assert together.groups[number].ranges == {
            (0, 0): (ByteRange(0, 0, 0, 0, HALF), ByteRange(1, 0, 0, HALF, HALF))
        }


@pytest.mark.parametrize(
    ("num_ranks", "block_tokens", "backend", "named"),
    [
        (2, 32, "CPU_ATTN", "section page: num_heads 2 != 1"),
        (1, 64, "CPU_ATTN", "its tokens lie together"),
        (2, 32, "FLASH_ATTN", "only one of them says how its pages lie"),
    ],
    ids=["states", "tokens", "kernel"],
)
def test_what_cannot_be_taken_apart_is_refused(
    num_ranks: int, block_tokens: int, backend: str, named: str
) -> None:
    reader = contract(num_ranks, states=True, block_tokens=block_tokens, backend=backend)
    with pytest.raises(ConfigError, match=named):
        plan_reads(contract(1, states=True), reader)
