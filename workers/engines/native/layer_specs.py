"""What each layer of a model keeps per request, from its configuration."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from disagg.errors import ConfigError
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.workers.engines.native.families import Family


def layer_specs(
    config: PreTrainedConfig, family: Family, *, block_tokens: int, dtype_bytes: int
) -> tuple[Spec | None, ...]:
    """Return what each layer keeps, in layer order; None: it reads another layer's KV.

    Raises:
        ConfigError: a field is missing or means what the engine does not compute.
    """
    if "kv_lora_rank" in family.implements:
        latent = positive(config, "kv_lora_rank") + positive(config, "qk_rope_head_dim")
        spec = MLASpec(block_tokens, 1, latent, dtype_bytes)
        return (spec,) * positive(config, "num_hidden_layers")
    owners = kv_owners(config, family)
    specs: list[Spec | None] = []
    for layer, kind in enumerate(layer_types(config, family)):
        one = config.per_layer_config[layer]  # heads differ from layer to layer in some families
        if layer in owners:
            specs.append(None)
            continue
        page = block_tokens, *_heads(one), dtype_bytes
        if kind == "full_attention":
            specs.append(FullAttentionSpec(*page))
        elif kind == "sliding_attention":
            specs.append(SlidingWindowSpec(*page, positive(one, "sliding_window")))
        else:
            specs.append(ChunkedLocalSpec(*page, positive(one, "attention_chunk_size")))
    return tuple(specs)


def layer_types(config: PreTrainedConfig, family: Family) -> Sequence[str]:
    """Return what each layer sees, by the names that ``layer_types`` uses.

    Raises:
        ConfigError: it is not said, or not what the engine computes.
    """
    num_layers = positive(config, "num_hidden_layers")
    if family.windows == "no_layer":
        return ["full_attention"] * num_layers
    if family.windows == "every_layer":
        windowed = config.sliding_window is not None
        return ["sliding_attention" if windowed else "full_attention"] * num_layers
    kinds = list(getattr(config, "layer_types", None) or [])
    if len(kinds) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers",
            param="layer_types",
        )
    local = "chunked" if "attention_chunk_size" in family.implements else "sliding"
    known = {"full_attention", f"{local}_attention"}
    if unknown := sorted(set(kinds) - known):
        raise ConfigError(
            f"config.json: layer_types has {unknown}; supported are {' and '.join(sorted(known))}",
            param="layer_types",
        )
    return kinds


def kv_owners(config: PreTrainedConfig, family: Family) -> dict[int, int]:
    """Return for each layer that has no K and V of its own the layer whose it reads.

    The last ``num_kv_shared_layers`` layers read what the last layer of their type before them
    wrote.

    Raises:
        ConfigError: there is no such layer.
    """
    num_shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if "num_kv_shared_layers" not in family.implements or not num_shared:
        return {}
    kinds = layer_types(config, family)
    first = len(kinds) - num_shared
    before = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    lacking = set(kinds) - before.keys()
    if lacking:
        raise ConfigError(
            f"config.json: num_kv_shared_layers={num_shared} leaves no layer of type "
            f"{' or '.join(sorted(lacking))} whose KV could be read",
            param="num_kv_shared_layers",
        )
    return {layer: before[kinds[layer]] for layer in range(first, len(kinds))}


def positive(config: PreTrainedConfig, field: str) -> int:
    """Return a field that must be a positive integer; raises ConfigError naming it."""
    number = getattr(config, field, None)
    if not isinstance(number, int) or number <= 0:
        raise ConfigError(f"config.json: {field}={number!r} is not a positive number", param=field)
    return number


def _heads(config: PreTrainedConfig) -> tuple[int, int]:
    """KV heads of a layer, and the size of one."""
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}",
            param="num_key_value_heads",
        )
    size = getattr(config, "head_dim", None) or positive(config, "hidden_size") // num_heads
    return num_kv_heads, int(size)
