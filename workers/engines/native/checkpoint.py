"""A checkpoint directory on disk: what it holds, and whether the engine can run it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from disagg.errors import ConfigError
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.model_shapes import read_shape
from disagg.workers.engines.checkpoint_files import model_fingerprint, read_json, read_weights
from disagg.workers.engines.native.families import REFUSED_FIELDS, ROPE_TYPES, SUPPORTED, Family

DTYPE_OF_BYTES = {4: "float32", 2: "bfloat16"}
"""A type of that size."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint; valid while the directory's files stay unchanged.

    Attributes:
        fingerprint: hex digest of config.json, the safetensors headers and the file sizes.
        num_weights: elements of all tensors.
        dtype: the type most of them are stored in, by torch's name if it has a known one.
        max_model_tokens: prompt plus generated tokens that the positions reach.
        eos_token_ids: the tokens that end a generation by default, ascending.
        layer_windows: per layer its window in tokens, None for full attention; empty where
            layers have states.
    """

    path: Path
    architecture: str
    family: Family
    config: PreTrainedConfig
    fingerprint: str
    num_weights: int
    dtype: str
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    num_kv_heads: int
    head_size: int

    def layer_specs(self, *, block_tokens: int, dtype_bytes: int) -> tuple[Spec | None, ...]:
        """Return what each layer keeps per request, in the order of `ModelShape.layer_specs`."""
        if self.family.has_states:
            fields = {"architectures": [self.architecture], "dtype": DTYPE_OF_BYTES[dtype_bytes]}
            shape = read_shape(self.config.to_dict() | fields, block_tokens=block_tokens)
            return shape.layer_specs
        return tuple(
            FullAttentionSpec(
                block_tokens=block_tokens,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype_bytes=dtype_bytes,
            )
            if window is None
            else SlidingWindowSpec(
                block_tokens=block_tokens,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype_bytes=dtype_bytes,
                window_tokens=window,
            )
            for window in self.layer_windows
        )


def open_checkpoint(model_dir: str | Path) -> Checkpoint:
    """Read and check a checkpoint directory; loads no weights.

    Raises:
        ConfigError: a file is missing or damaged, or the model is one the engine cannot run
            exactly; ``param`` names the file or the config field.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ConfigError(f"no checkpoint directory at {path}", param="model")
    raw = read_json(path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise ConfigError(f"{path / name} is missing", param=name)
    architecture = _architecture(raw)
    for field in REFUSED_FIELDS:
        if raw.get(field):
            raise ConfigError(
                f"config.json: {field}={raw[field]!r} is not supported by the engine", param=field
            )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        raise ConfigError(f"config.json: {error}", param="config.json") from error
    _check_rope(config)
    family = SUPPORTED[architecture]
    eos = getattr(config, "eos_token_id", None)
    if (path / "generation_config.json").is_file():
        eos = read_json(path / "generation_config.json").get("eos_token_id", eos)
    heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads")
    if heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}",
            param="num_key_value_heads",
        )
    num_weights, dtype = read_weights(path)
    head_size = getattr(config, "head_dim", None) or _positive(config, "hidden_size") // heads
    return Checkpoint(
        path=path,
        architecture=architecture,
        family=family,
        config=config,
        fingerprint=model_fingerprint(path),
        num_weights=num_weights,
        dtype=dtype,
        vocab_size=_positive(config, "vocab_size"),
        max_model_tokens=_positive(config, "max_position_embeddings"),
        eos_token_ids=_token_ids(eos),
        layer_windows=() if family.has_states else _layer_windows(config, raw, family),
        num_kv_heads=num_kv_heads,
        head_size=int(head_size),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in SUPPORTED:
        raise ConfigError(
            f"config.json: architectures={names} is not supported; "
            f"supported are {', '.join(sorted(SUPPORTED))}",
            param="architectures",
        )
    return str(names[0])


def _check_rope(config: PreTrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for parameters in kinds:
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"config.json: rope_type={kind!r} is not supported; "
                f"supported are {', '.join(sorted(ROPE_TYPES))}",
                param="rope_parameters",
            )


def _layer_windows(
    config: PreTrainedConfig, raw: dict[str, Any], family: Family
) -> tuple[int | None, ...]:
    num_layers = _positive(config, "num_hidden_layers")
    kinds: list[str]
    if family.windows == "per_layer":
        kinds = list(getattr(config, "layer_types", None) or [])
        if len(kinds) != num_layers:
            raise ConfigError(
                f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers",
                param="layer_types",
            )
    else:
        windowed = family.windows == "every_layer" and config.sliding_window is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * num_layers
        # The model code of these families ignores the field: obeying or ignoring it is a guess.
        if raw.get("layer_types") and list(raw["layer_types"]) != kinds:
            raise ConfigError(
                f"config.json: layer_types contradicts what {family.name} computes",
                param="layer_types",
            )
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"config.json: layer_types has {unknown}; "
            "supported are full_attention and sliding_attention",
            param="layer_types",
        )
    window = _positive(config, "sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _positive(config: PreTrainedConfig, field: str) -> int:
    number = getattr(config, field, None)
    if not isinstance(number, int) or number <= 0:
        raise ConfigError(f"config.json: {field}={number!r} is not a positive number", param=field)
    return number


def _token_ids(field: object) -> tuple[int, ...]:
    ids = field if isinstance(field, list) else [] if field is None else [field]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(f"eos_token_id={field!r} is not a token id", param="eos_token_id")
    return tuple(sorted(set(ids)))
