"""Memory plans against numbers computed by hand; configs in tests/data/model_configs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.kv.shapes.memory_plan import all_layers_full, parse_memory, plan_memory
from disagg.kv.shapes.model_shapes import FAMILIES, read_shape
from disagg.kv.shapes.whole_states import plan_whole_states

CONFIGS = Path(__file__).parents[3] / "data" / "model_configs"
GIB = 1 << 30


@dataclass
class Expected:
    """Groups as (kind, layers, blocks per state, padding), then counts in 64 GiB."""

    context: int
    page: int
    block_bytes: int
    groups: list[tuple[str, int, int, int]]
    num_blocks: int
    per_sequence: int
    sequences: int
    sequences_full: int


@dataclass
class Whole:
    """Where states lie whole: groups as (kind, layers, padding), 64 GiB of 32,768 tokens each."""

    block_tokens: int
    block_bytes: int
    groups: list[tuple[str, int, int]]
    sequences: int


BY_HAND = {
    # 34 layers, each 6th of 29 + 5 full. Page: 2 * 4 heads * 16 tokens * 256 * 2 bytes = 65,536.
    # Blocks of 5 pages: 29 window layers = 4 groups of 5, one of 5, one of 4 (a page of padding).
    # A window of 1,024 spans 64 blocks and, as it may start inside one, 1 more: 8192 + 6 * 65.
    "gemma-3-4b": Expected(
        131_072,
        65_536,
        327_680,
        [("sliding_window", 5, 1, 0)] * 5
        + [("sliding_window", 4, 1, 65_536), ("full_attention", 5, 1, 0)],
        209_715,
        8_582,
        24,  # 209,714 / 8,582 = 24.4
        3,  # all full: 34 pages = 2,228,224 bytes; 30,839 / 8,192 = 3.8
    ),
    # 62 layers: 52 window, 10 full. Page: 2 * 16 * 16 * 128 * 2 = 131,072; blocks of 10 pages.
    # 52 = 4 * 9 + 2 * 8.
    "gemma-3-27b": Expected(
        131_072,
        131_072,
        1_310_720,
        [("sliding_window", 9, 1, 131_072)] * 4
        + [("sliding_window", 8, 1, 262_144)] * 2
        + [("full_attention", 10, 1, 0)],
        52_428,
        8_582,
        6,  # 52,427 / 8,582 = 6.1
        1,  # 62 pages = 8,126,464 bytes; 8,455 / 8,192 = 1.03
    ),
    # 18 + 18 layers. Page: 2 * 8 * 16 * 64 * 2 = 32,768. Window 128: 8 + 1 blocks.
    "gpt-oss-120b": Expected(
        131_072,
        32_768,
        589_824,
        [("sliding_window", 18, 1, 0), ("full_attention", 18, 1, 0)],
        116_508,
        8_201,
        14,  # 116,507 / 8,201 = 14.2
        7,  # 36 pages = 1,179,648 bytes; 58,253 / 8,192 = 7.1
    ),
    # 36 chunked layers, 12 full. Page: 2 * 8 * 16 * 128 * 2 = 65,536; blocks of 12 pages.
    # A chunk of 8,192 is 512 blocks; 1 for the step into the next chunk: 8192 + 3 * 513.
    "llama-4-scout": Expected(
        131_072,
        65_536,
        786_432,
        [("chunked_local", 12, 1, 0)] * 3 + [("full_attention", 12, 1, 0)],
        87_381,
        9_731,
        8,  # 87,380 / 9,731 = 8.98
        2,  # 48 pages = 3,145,728 bytes; 21,844 / 8,192 = 2.7
    ),
    # 32 window layers, nothing else: one group of 32 pages of 65,536. Window 4,096: 256 + 1.
    "mistral-7b-v0.1": Expected(
        32_768,
        65_536,
        2_097_152,
        [("sliding_window", 32, 1, 0)],
        32_768,
        257,
        127,  # 32,767 / 257 = 127.5
        15,  # 32,767 / 2,048 = 15.99
    ),
    # 12 full layers: page 2 * 2 * 16 * 256 * 2 = 32,768, block 393,216 bytes of 16 tokens.
    # State: 32 heads * 128 * 128 * 4 = 2,097,152, convolved (2 * 16 + 32) * 128 = 8,192 channels
    # * 3 * 2 = 49,152; 36 layers: 77,266,944 = 196.5 blocks, so 197, padding 196,608.
    # A sequence has the running state and the next: 8192 + 2 * 197.
    "qwen3-next-80b-a3b": Expected(
        131_072,
        32_768,
        393_216,
        [("linear_state", 36, 197, 196_608), ("full_attention", 12, 1, 0)],
        174_762,
        8_586,
        20,  # 174,761 / 8,586 = 20.4
        20,
    ),
    # 4 full layers: page 65,536, block 262,144. State: 8,192 * 16 * 4 + 8,192 * 3 * 2 = 573,440;
    # 28 layers: 16,056,320 = 61.25 blocks, so 62, padding 196,608.
    "jamba-v0.1": Expected(
        131_072,
        65_536,
        262_144,
        [("linear_state", 28, 62, 196_608), ("full_attention", 4, 1, 0)],
        262_144,
        8_316,
        31,  # 262,143 / 8,316 = 31.5
        31,
    ),
    # 27 Mamba-2, 25 MLP, 4 attention layers. Page 65,536, block 262,144.
    # State: 128 * 80 * 128 * 4 = 5,242,880, convolved 10,240 + 2 * 8 * 128 = 12,288 channels
    # * 3 * 2 = 73,728; 27 layers: 143,548,416 = 547.6 blocks, so 548, padding 106,496.
    "nemotron-nano-9b-v2": Expected(
        131_072,
        65_536,
        262_144,
        [("linear_state", 27, 548, 106_496), ("full_attention", 4, 1, 0)],
        262_144,
        9_288,
        28,  # 262,143 / 9,288 = 28.2
        28,
    ),
}


def config_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return content


def test_every_config_has_its_numbers() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == BY_HAND.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    expected = BY_HAND[name]
    specs = read_shape(config_of(name)).layer_specs
    plan = plan_memory(specs, 64 * GIB, expected.context)
    pages = {s.page_bytes for g in plan.layout.groups for s in [g.spec] if g.blocks_per_state == 1}
    assert pages == {expected.page}
    assert plan.layout.block_bytes == expected.block_bytes
    order = [(g.kind, g.num_layers, g.blocks_per_state, g.padding_bytes) for g in plan.groups]
    assert sorted(order) == sorted(expected.groups)
    assert plan.num_blocks == expected.num_blocks
    assert plan.blocks_per_sequence == expected.per_sequence
    assert plan.num_sequences == expected.sequences
    assert plan.num_tokens // expected.context == expected.sequences
    full = plan_memory(all_layers_full(specs), 64 * GIB, expected.context)
    assert full.num_sequences == expected.sequences_full
    assert max(group.block_tokens for group in plan.groups) <= 64
    layers = sorted(layer for group in plan.layout.groups for layer in group.layers)
    assert layers == [layer for layer, spec in enumerate(specs) if spec is not None]


WHOLE_STATES = {
    # 24,576 bytes of attention a token, 2,146,304 of a state. Six states, 12,877,824 bytes, want
    # 524 tokens: 33 * 16 = 528, padding 98,304. Five would make 8 + 1 groups.
    "qwen3-next-80b-a3b": Whole(
        528, 12_976_128, [("linear_state", 6, 98_304)] * 6 + [("full_attention", 12, 0)], 70
    ),
    # 16,384 bytes a token, 573,440 of a state. Four states, 2,293,760 bytes, want 140: 144 tokens.
    "jamba-v0.1": Whole(
        144, 2_359_296, [("linear_state", 4, 65_536)] * 7 + [("full_attention", 4, 0)], 120
    ),
    # 16,384 bytes a token, 5,316,608 of a state. Four states, 21,266,432 bytes, are 1,298 tokens:
    # 1,296 leave 32,768 bytes of each attention block unused, 1,312 more of each state's.
    "nemotron-nano-9b-v2": Whole(
        1_296,
        21_266_432,
        [("full_attention", 4, 32_768)]
        + [("linear_state", 3, 5_316_608)]
        + [("linear_state", 4, 0)] * 6,
        80,
    ),
}


@pytest.mark.parametrize("name", WHOLE_STATES)
def test_whole_states_by_hand(name: str) -> None:
    """A state of one layer lies in one block: the block grows, what is left is padding."""
    expected = WHOLE_STATES[name]
    specs = read_shape(config_of(name)).layer_specs
    plan = plan_memory(specs, 64 * GIB, 32_768, whole_states=True)
    assert plan.layout.block_bytes == expected.block_bytes
    assert {group.block_tokens for group in plan.groups} == {expected.block_tokens}
    assert {group.blocks_per_state for group in plan.groups} == {1}
    order = [(group.kind, group.num_layers, group.padding_bytes) for group in plan.groups]
    assert sorted(order) == sorted(expected.groups)
    assert plan.num_sequences == expected.sequences
    layers = sorted(layer for group in plan.layout.groups for layer in group.layers)
    assert layers == [layer for layer, spec in enumerate(specs) if spec is not None]
    # The price, beside states that are lists of blocks: at most one part in twenty here.
    assert expected.sequences >= 0.95 * plan_memory(specs, 64 * GIB, 32_768).num_sequences


def test_whole_states_change_nothing_where_there_are_none() -> None:
    specs = read_shape(config_of("gemma-3-4b")).layer_specs
    assert plan_whole_states(specs) == plan_layout(specs)


def test_whole_states_of_two_sizes_and_of_a_model_of_states_alone() -> None:
    small, large = LinearStateSpec(16, 1_000), LinearStateSpec(16, 3_000)
    layout = plan_whole_states([small, large, small, small, None])
    assert (layout.block_bytes, layout.hash_block_tokens) == (3_000, 16)
    assert [(group.layers, group.blocks_per_state) for group in layout.groups] == [
        ((0, 2, 3), 1),
        ((1,), 1),
    ]
    attention = FullAttentionSpec(16, 1, 4, 4)  # 512 bytes a block
    layout = plan_whole_states([small, large, attention])
    assert layout.block_bytes >= 3_000
    assert {group.spec.block_tokens for group in layout.groups} == {layout.hash_block_tokens}
    assert all(group.unit_bytes <= layout.block_bytes for group in layout.groups)


@pytest.mark.parametrize("name", WHOLE_STATES)
def test_states_are_admitted_as_planned_where_they_are_whole(name: str) -> None:
    specs = read_shape(config_of(name)).layer_specs
    block_bytes = plan_memory(specs, 64 * GIB, 8_192, whole_states=True).layout.block_bytes
    plan = plan_memory(specs, 200 * block_bytes, 8_192, whole_states=True)
    kv = KVCacheCoordinator(plan.layout, plan.num_blocks, max_model_tokens=8_192, max_step_tokens=1)
    admitted = 0
    while kv.admit(admitted, 8_192):
        admitted += 1
    assert admitted == plan.num_sequences > 1
    kv.check()


@pytest.mark.parametrize("name", ["gemma-3-4b", "gpt-oss-120b", "llama-4-scout", "jamba-v0.1"])
def test_as_many_sequences_are_admitted_as_planned(name: str) -> None:
    """In a real coordinator of the planned pool, and not one more."""
    specs = read_shape(config_of(name)).layer_specs
    block_bytes = plan_memory(specs, 64 * GIB, 32_768).layout.block_bytes
    plan = plan_memory(specs, 5_000 * block_bytes, 4_096)
    kv = KVCacheCoordinator(plan.layout, plan.num_blocks, max_model_tokens=4_096, max_step_tokens=1)
    admitted = 0
    while kv.admit(admitted, 4_096):
        admitted += 1
    assert admitted == plan.num_sequences > 1
    kv.check()


@pytest.mark.parametrize("name", BY_HAND)
def test_geometry_does_not_depend_on_the_ranks(name: str) -> None:
    specs = read_shape(config_of(name)).layer_specs
    plans = [
        plan_memory(specs, 64 * GIB, 8_192, tensor_parallel=ranks) for ranks in (1, 2, 4, 8, 16)
    ]
    assert all(plan.layout == plans[0].layout for plan in plans)
    assert all(plan.groups == plans[0].groups for plan in plans)


def test_heads_are_split_or_replicated() -> None:
    specs = read_shape(config_of("gemma-3-4b")).layer_specs  # 4 KV heads, blocks of 327,680
    of_rank = {
        ranks: plan_memory(specs, 64 * GIB, 8_192, tensor_parallel=ranks) for ranks in (2, 4, 8)
    }
    assert {ranks: plan.rank_block_bytes for ranks, plan in of_rank.items()} == {
        2: 163_840,
        4: 81_920,
        8: 81_920,  # each head is kept twice
    }
    assert of_rank[8].num_blocks == 64 * GIB // 8 // 81_920
    with pytest.raises(ConfigError, match="4 KV heads cannot be shared by 3 ranks"):
        plan_memory(specs, 64 * GIB, 8_192, tensor_parallel=3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 * GIB),
        ("80GB", 80_000_000_000),
        ("1.5 GiB", 3 * GIB // 2),
        ("512MiB", 512 << 20),
        ("1048576", 1 << 20),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "64gib", "64 Gi B x", "-1GiB", "1e3GiB", "0", "1.2.3B"]
)
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="memory") as caught:
        parse_memory(text)
    assert caught.value.param == "memory"


def test_a_budget_for_nothing_is_refused() -> None:
    specs = read_shape(config_of("gemma-3-4b")).layer_specs
    with pytest.raises(ConfigError, match="fewer than two blocks of 327680"):
        plan_memory(specs, 400_000, 4_096)
    with pytest.raises(ConfigError, match="context"):
        plan_memory(specs, GIB, 0)


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"architectures": ["FalconMambaForCausalLM"]}, "architectures", "FalconMambaForCausalLM"),
        ({"architectures": None}, "architectures", "supported are BambaForCausalLM"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "not a positive number"),
        ({"hidden_size": None}, "hidden_size", "None"),
        ({"dtype": "float8"}, "dtype", "float8"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers", "not supported"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention", "odd"]},
            "layer_types",
            "odd",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]},
            "num_hidden_layers",
            "1 layers are described",
        ),
        (
            {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern",
            "more than M",
        ),
    ],
)
def test_configs_are_refused_by_name(change: dict[str, Any], param: str, said: str) -> None:
    assert read_shape(BASE).layer_specs
    with pytest.raises(ConfigError, match=said) as caught:
        read_shape({**BASE, **change})
    assert caught.value.param == param


def test_qwens_upper_layers_have_the_window_only_if_it_is_used() -> None:
    config = {
        **BASE,
        "architectures": ["Qwen3ForCausalLM"],
        "sliding_window": 32,
        "max_window_layers": 1,
    }
    assert len(set(read_shape(config).layer_specs)) == 1
    first, second = read_shape({**config, "use_sliding_window": True}).layer_specs
    assert type(first).__name__ == "FullAttentionSpec"
    assert type(second).__name__ == "SlidingWindowSpec"


def test_latents_have_no_heads_to_split() -> None:
    config = {
        **BASE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    (spec,) = set(read_shape(config).layer_specs)
    assert spec is not None
    assert spec.page_bytes == 16 * 576 * 2
    assert plan_memory([spec] * 2, GIB, 64, tensor_parallel=8).rank_block_bytes == 2 * 16 * 576 * 2


def test_every_family_of_the_engine_can_be_planned() -> None:
    from disagg.workers.engines.native.families import SUPPORTED

    assert SUPPORTED.keys() <= FAMILIES.keys()
