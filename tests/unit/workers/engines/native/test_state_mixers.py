"""Where states lie in their blocks, and which modules may keep some."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    KimiLinearConfig,
    MiniMaxConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    Zamba2Config,
    xLSTMConfig,
)

from disagg.errors import ConfigError
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout, plan_layout
from disagg.workers.engines.native.state_cache import CallStates, StateShape, place_states
from disagg.workers.engines.native.state_mixers import StateMixers
from tests.tiny_families import FAMILIES

SHAPE = StateShape((6, 3), (3, 5))
PAGES = FullAttentionSpec(4, 1, 8, 4)


def layout(block_bytes: int, dtype: torch.dtype) -> KVCacheLayout:
    """Three layers of states in blocks that cut them anywhere."""
    state_bytes = 15 * 4 + 18 * dtype.itemsize
    group = KVCacheGroup(0, LinearStateSpec(4, state_bytes), (0, 1, 2), -(-3 * state_bytes // 40))
    return KVCacheLayout((group,), block_bytes, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [40, 41, 48])
def test_states_are_cut_over_their_blocks(block_bytes: int, dtype: torch.dtype) -> None:
    made = layout(block_bytes, dtype)
    size = made.groups[0].blocks_per_state
    pool = torch.full((60, block_bytes), -1, dtype=torch.int8)
    states = torch.randperm(59)[: 3 * size].view(3, size) + 1
    layers = [place_states(made, pool, layer, SHAPE, dtype) for layer in range(3)]
    written = []
    for number, layer in enumerate(layers):
        assert layer.recurrent is not None
        conv, recurrent = torch.randn(3, 6, 3).to(dtype), torch.randn(3, 3, 5) + number
        layer.conv.write(states, conv)
        layer.recurrent.write(states, recurrent)
        written.append((conv, recurrent))
    for layer, (conv, recurrent) in zip(layers, written, strict=True):
        assert layer.recurrent is not None
        assert torch.equal(layer.conv.read(states), conv)
        assert torch.equal(layer.recurrent.read(states), recurrent)
        swapped = layer.recurrent.read(states.flip(0))
        assert torch.equal(swapped, recurrent.flip(0))
    others = [block for block in range(60) if block not in states.flatten().tolist()]
    assert bool((pool[others] == -1).all())
    assert bool((pool[:, made.useful_bytes(0) :] == -1).all())


def test_a_call_has_one_layers_states_and_no_others() -> None:
    states = CallStates(3, torch.zeros(1, 6, 3), None)
    assert states.update_conv_state(torch.ones(1, 6, 1), 3).shape == (1, 6, 4)
    assert states.conv[0, 0].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="layer 2"):
        states.get_conv_state(2)
    with pytest.raises(ValueError, match="state 1"):
        states.get_recurrent_state(3, state_idx=1)
    with pytest.raises(ValueError, match="none"):
        states.update_recurrent_state(torch.zeros(1), 3)


SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
STRANGERS: dict[str, Any] = {
    "KimiLinear": lambda: KimiLinearConfig(**SMALL, pad_token_id=0),
    "MiniMaxLightningAttention": lambda: MiniMaxConfig(**SMALL),
    "RecurrentGemma": lambda: RecurrentGemmaConfig(**SMALL, lru_width=32),
    "Rwkv": lambda: RwkvConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2),
    "Zamba2MambaMixer": lambda: Zamba2Config(
        **SMALL, layers_block_type=["linear_attention", "hybrid"] * 2
    ),
    "xLSTM": lambda: xLSTMConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_heads=4),
}


def wrap(model: torch.nn.Module, layout: KVCacheLayout) -> StateMixers:
    pool = torch.zeros(2, layout.block_bytes, dtype=torch.int8)
    return StateMixers(model, layout, pool, torch.float32, first_layer=0)


@pytest.mark.parametrize("name", sorted(STRANGERS))
def test_a_model_with_undeclared_state_is_refused_by_name(name: str) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            STRANGERS[name]()
        )
    with pytest.raises(ConfigError, match=f"{name}.* keeps a state"):
        wrap(model, plan_layout([PAGES] * 3))


def lfm2() -> torch.nn.Module:
    tiny = FAMILIES["lfm2"]
    with torch.device("meta"):
        model: torch.nn.Module = tiny.model(tiny.config(**SMALL | tiny.fields))
    return model


def test_a_release_that_hands_states_over_another_way_is_named() -> None:
    """Mixers of transformers before 5.21 have the names of those we know, and take their states."""

    class JambaMambaMixer(torch.nn.Module):
        layer_idx = 0

        def forward(self, cache_params: Any) -> Any:
            return cache_params.conv_states[self.layer_idx]

    made = layout(40, torch.float32)
    pool = torch.zeros((8, 40), dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"JambaMambaMixer .* transformers \S+ .* 5\.21 or newer"):
        StateMixers(JambaMambaMixer(), made, pool, torch.float32, first_layer=0)


def test_layout_and_modules_must_agree() -> None:
    state = LinearStateSpec(4, 32 * 2 * 4)
    assert wrap(lfm2(), plan_layout([state, PAGES, state, state])).calls == {}
    other = LinearStateSpec(4, 260)
    refused: list[tuple[list[Spec], str]] = [
        ([PAGES, PAGES, state, state], "Lfm2ShortConv keeps a state"),
        ([other, PAGES, other, other], "takes 256 bytes"),
        ([state] * 5, r"layers \[1, 4\]"),
    ]
    for specs, said in refused:
        with pytest.raises(ConfigError, match=said):
            wrap(lfm2(), plan_layout(specs))
