"""What the layers of models with linear states keep, from their config.json.

Every rule gives the recurrent state's elements and the inputs that its convolution looks back at;
the model code's own state has one column more, which no token ever reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.shapes.config_fields import ConfigFields, Rule, specs_of

_NEMOTRON_MARKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _gated_delta_net(config: ConfigFields) -> Sequence[Spec | None]:
    """A [key, value] matrix per value head; q, k and v are convolved."""
    names = config.listed("layer_types", str)
    if not names:
        period = config.number("full_attention_interval")
        names = [
            "full_attention" if (layer + 1) % period == 0 else "linear_attention"
            for layer in config.layers()
        ]
    key_size, value_size = (config.number(f"linear_{k}_head_dim") for k in ("key", "value"))
    keys = config.number("linear_num_key_heads") * key_size
    values = config.number("linear_num_value_heads") * value_size
    kernel = config.number("linear_conv_kernel_dim")
    return specs_of(config, names, config.state(values * key_size, 2 * keys + values, kernel))


def _jamba(config: ConfigFields) -> Sequence[Spec | None]:
    """Mamba-1: x is convolved."""
    period, offset = config.number("attn_layer_period"), config.get("attn_layer_offset")
    inner = config.number("mamba_expand") * config.number("hidden_size")
    size, kernel = config.number("mamba_d_state"), config.number("mamba_d_conv")
    state = config.state(inner * size, inner, kernel)
    return [config.full() if layer % period == offset else state for layer in config.layers()]


def _nemotron_h(config: ConfigFields) -> Sequence[Spec | None]:
    """``layers_block_type``, else a pattern with a mark per layer."""
    names = config.listed("layers_block_type", str)
    pattern = config.get("hybrid_override_pattern")
    if not names:
        if not isinstance(pattern, str) or set(pattern) - _NEMOTRON_MARKS.keys():
            raise ConfigError(
                f"config.json: hybrid_override_pattern={pattern!r} has more than "
                f"{', '.join(_NEMOTRON_MARKS)}",
                param="hybrid_override_pattern",
            )
        names = [_NEMOTRON_MARKS[mark] for mark in pattern]
    inner = config.number("mamba_num_heads") * config.number("mamba_head_dim")
    groups, size = config.number("n_groups"), config.number("ssm_state_size")
    return specs_of(config, names, _mamba2(config, inner, groups, size, "conv_kernel"))


def _granite(config: ConfigFields) -> Sequence[Spec | None]:
    """``layer_types``, where nothing is said all states; or Bamba's list of attention layers."""
    names = config.listed("layer_types", str) or config.listed("layers_block_type", str)
    if not names:
        attention = config.listed("attn_layer_indices", int)
        names = ["attention" if layer in attention else "mamba" for layer in config.layers()]
    return specs_of(config, names, _mamba_fields(config, 0))


def _falcon_h1(config: ConfigFields) -> Sequence[Spec | None]:
    """Every layer has both: the attention of all of them, then the states of all of them."""
    state = _mamba_fields(config, config.count("mamba_d_ssm"))
    return [*(config.full() for _ in config.layers()), *(state for _ in config.layers())]


def _lfm2(config: ConfigFields) -> Sequence[Spec | None]:
    """A convolution alone: its inputs are all the state there is."""
    names = config.listed("layer_types", str)
    if not names:
        attention = config.listed("full_attn_idxs", int) or config.layers()
        names = ["attention" if layer in attention else "conv" for layer in config.layers()]
    state = config.state(0, config.number("hidden_size"), config.number("conv_L_cache"))
    return specs_of(config, names, state)


def _mamba_fields(config: ConfigFields, inner: int) -> LinearStateSpec:
    """Mamba-2 where the fields' names begin with ``mamba_``."""
    inner = inner or config.number("mamba_expand") * config.number("hidden_size")
    groups, size = config.number("mamba_n_groups"), config.number("mamba_d_state")
    return _mamba2(config, inner, groups, size, "mamba_d_conv")


def _mamba2(
    config: ConfigFields, inner: int, groups: int, size: int, kernel: str
) -> LinearStateSpec:
    """x, B and C are convolved."""
    return config.state(inner * size, inner + 2 * groups * size, config.number(kernel))


_GDN = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_JAMBA = {
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

STATE_FAMILIES: dict[str, tuple[Rule, Mapping[str, Any]]] = {
    "BambaForCausalLM": (_granite, _MAMBA),
    "FalconH1ForCausalLM": (_falcon_h1, _MAMBA | {"mamba_d_ssm": 1024}),
    "GraniteMoeHybridForCausalLM": (_granite, _MAMBA),
    "JambaForCausalLM": (_jamba, _JAMBA),
    "Lfm2ForCausalLM": (_lfm2, {"conv_L_cache": 3}),
    "NemotronHForCausalLM": (_nemotron_h, {}),
    "Qwen3NextForCausalLM": (_gated_delta_net, _GDN),
    "Qwen3_5ForCausalLM": (_gated_delta_net, _GDN),
}
"""By the name in ``architectures``: which layer keeps what, and the fields' defaults."""
