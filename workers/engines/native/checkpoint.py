"""A checkpoint directory on disk: what it holds, and whether the engine can run it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import Spec
from disagg.kv.shapes.model_shapes import read_shape
from disagg.workers.engines.checkpoint_files import (
    check_files,
    model_fingerprint,
    read_json,
)
from disagg.workers.engines.native.families import REFUSED_FIELDS, ROPE_TYPES, SUPPORTED, Family
from disagg.workers.engines.native.layer_specs import (
    kv_owners,
    layer_specs,
    layer_types,
    positive,
)

DTYPE_OF_BYTES = {4: "float32", 2: "bfloat16"}
"""A type of that size."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint; valid while the directory's files stay unchanged.

    Attributes:
        fingerprint: see `model_fingerprint`.
        num_weights: elements of all tensors.
        dtype: the type most of them are stored in, by torch's name if it has a known one.
        max_model_tokens: prompt plus generated tokens that the positions reach.
        eos_token_ids: the tokens that end a generation by default, ascending.
        kv_owners: for each layer without KV of its own the layer whose it reads.
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
    kv_owners: dict[int, int]

    def layer_specs(self, *, block_tokens: int, dtype_bytes: int) -> tuple[Spec | None, ...]:
        """Return what each layer keeps per request, in the order of `ModelShape.layer_specs`."""
        if self.family.has_states:
            fields = {"architectures": [self.architecture], "dtype": DTYPE_OF_BYTES[dtype_bytes]}
            shape = read_shape(self.config.to_dict() | fields, block_tokens=block_tokens)
            return shape.layer_specs
        return layer_specs(
            self.config, self.family, block_tokens=block_tokens, dtype_bytes=dtype_bytes
        )


def open_checkpoint(model_dir: str | Path) -> Checkpoint:
    """Read and check a checkpoint directory; loads no weights.

    Raises:
        ConfigError: a file is missing or damaged, or the model is one the engine cannot run
            exactly; ``param`` names the file or the config field.
    """
    path = Path(model_dir)
    weights = check_files(path)
    raw = read_json(path / "config.json")
    architecture = _architecture(raw)
    family = SUPPORTED[architecture]
    for field in REFUSED_FIELDS:
        if raw.get(field) and field not in family.implements:
            raise ConfigError(
                f"config.json: {field}={raw[field]!r} is not supported by the engine", param=field
            )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        raise ConfigError(f"config.json: {error}", param="config.json") from error
    _check_rope(config)
    if not family.has_states:
        layer_specs(config, family, block_tokens=1, dtype_bytes=1)
        # The model code of these families ignores the field: obeying or ignoring it is a guess.
        if family.windows != "per_layer" and raw.get("layer_types"):
            _check_ignored_types(config, family, list(raw["layer_types"]))
    eos = getattr(config, "eos_token_id", None)
    generation_file = path / "generation_config.json"
    if os.path.lexists(generation_file):  # one that cannot be read is not as good as none
        eos = read_json(generation_file).get("eos_token_id", eos)
    return Checkpoint(
        path=path,
        architecture=architecture,
        family=family,
        config=config,
        fingerprint=model_fingerprint(path),
        num_weights=weights.num_elements,
        dtype=weights.dtype,
        vocab_size=positive(config, "vocab_size"),
        max_model_tokens=positive(config, "max_position_embeddings"),
        eos_token_ids=_token_ids(eos),
        kv_owners=kv_owners(config, family),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED:
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


def _check_ignored_types(config: PreTrainedConfig, family: Family, kinds: list[str]) -> None:
    if kinds != list(layer_types(config, family)):
        raise ConfigError(
            f"config.json: layer_types contradicts what {family.name} computes",
            param="layer_types",
        )


def _token_ids(field: object) -> tuple[int, ...]:
    ids = field if isinstance(field, list) else [] if field is None else [field]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(f"eos_token_id={field!r} is not a token id", param="eos_token_id")
    return tuple(sorted(set(ids)))
