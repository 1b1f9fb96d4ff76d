"""The files of a checkpoint directory, as every engine needs them: JSON, safetensors headers."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.kv.shapes.config_fields import text_part
from disagg.tls.given_file import read_given

HEADER_BYTES_MAX = 100_000_000
"""The safetensors format's own bound on its JSON header."""
JSON_BYTES_MAX = 100_000_000
"""An index of the weights has 10 MB where there are many experts."""
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Torch's names of the types a safetensors header names."""
ADAPTER = "adapter_config.json"
"""Only PEFT writes it."""
VALUE_BYTES = 64
"""Of each tensor's middle, for the fingerprint."""


def model_fingerprint(model_dir: str | Path) -> str:
    """Return the hex digest two workers compare before KV moves between them.

    It covers config.json, and of every safetensors file name, size and header (names, shapes and
    types of all tensors) and some values of each tensor, which differ between fine-tuned models.

    Raises:
        ConfigError: a file is missing or damaged; ``param`` names it.
    """
    path = Path(model_dir)
    digest = hashlib.sha256(b"disagg.model.v1")
    parts = [("config.json", _read_whole(path / "config.json"))]
    for file in weight_files(path):
        header = _safetensors_header(file)
        parts.append((f"{file.name}:{file.stat().st_size}", header + _some_values(file, header)))
    for name, content in parts:
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What the files of a checkpoint hold.

    Attributes:
        num_elements: of all tensors.
        num_bytes: of all tensors.
        dtype: to compute in, by torch's name: that of most elements; what the configuration says
            where the weights are quantized.
        quantized: the configuration says how.
    """

    num_elements: int
    num_bytes: int
    dtype: str
    quantized: bool = False

    def bytes_in(self, dtype_bytes: int) -> int:
        """Bytes in memory, where elements that are not quantized take so many each."""
        return self.num_bytes if self.quantized else self.num_elements * dtype_bytes


def check_files(model_dir: str | Path) -> StoredWeights:
    """Check that every file is there and whole, as any engine needs them; reads headers alone.

    Raises:
        ConfigError: one is missing or damaged; ``param`` names it, or is ``model``.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ConfigError(f"no checkpoint directory at {path}", param="model")
    read_json(path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise ConfigError(f"{path / name} is missing", param=name)
    return read_weights(path)


def read_weights(model_dir: str | Path) -> StoredWeights:
    """Read how many weights there are, and of which type; from headers alone.

    Raises:
        ConfigError: a file is missing or damaged, or an adapter is beside the weights; ``param``
            names it.
    """
    path = Path(model_dir)
    if (path / ADAPTER).exists():
        raise ConfigError(
            f"{path / ADAPTER}: a PEFT adapter lies beside the model, and no engine applies one;"
            " merge it into the weights (PEFT's merge_and_unload), or take it out of the directory"
            " to serve the model without it",
            param=ADAPTER,
        )
    elements: Counter[str] = Counter()
    num_bytes = 0
    file_of: dict[str, Path] = {}
    for file in weight_files(path):
        for name, tensor in _tensors(_safetensors_header(file)).items():
            if name in file_of:  # which of the two is loaded depends on who loads
                raise ConfigError(
                    f"{file} and {file_of[name].name} both hold the tensor {name}", param=file.name
                )
            file_of[name] = file
            elements[tensor["dtype"]] += math.prod(tensor["shape"])
            begin, end = tensor["data_offsets"]
            num_bytes += end - begin
    dtype = max(elements, key=lambda name: elements[name], default="F32")
    stored = StoredWeights(elements.total(), num_bytes, DTYPE_NAMES.get(dtype, dtype))
    config = read_json(path / "config.json")
    text = text_part(config)
    if not (config.get("quantization_config") or text.get("quantization_config")):
        return stored
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or stored.dtype
    return replace(stored, dtype=str(named), quantized=True)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises ConfigError naming the file."""
    try:
        content = json.loads(_read_whole(file))
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: {error}", param=file.name) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object", param=file.name)
    return content


def _read_whole(file: Path) -> bytes:
    """A pipe, or a device, is refused: it would be waited for, or read for ever."""
    try:
        return read_given(file, JSON_BYTES_MAX)[0]
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is missing", param=file.name) from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", param=file.name) from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint; raises ConfigError naming one that is missing."""
    single = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            why_pickled(path)
            or f"{path} holds neither model.safetensors nor model.safetensors.index.json",
            param="model.safetensors",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map is missing", param="weight_map")
    files = [path / str(name) for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != path or not file.is_file():
            raise ConfigError(f"{file}, named by {index.name}, is missing", param=file.name)
    return files


def why_pickled(path: Path) -> str:
    """Why weights in PyTorch's own format cannot be used; "" where there are others, or none."""
    names = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if not names or any(path.glob("*.safetensors")):
        return ""
    return (
        f"{path} holds its weights in PyTorch's own format alone ({names[0]}), which is not read:"
        " to load it can run code. Convert it to safetensors, where you trust it: load the model"
        " by transformers' from_pretrained, and write it anew by save_pretrained"
    )


def _safetensors_header(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= num_bytes <= min(HEADER_BYTES_MAX, size - 8):
            raise ConfigError(f"{file} is not a safetensors file, or is cut off", param=file.name)
        header = stream.read(num_bytes)
    try:
        end = max(map(_end_of, _tensors(header).values()), default=0)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: damaged safetensors header", param=file.name) from error
    if 8 + num_bytes + end != size:
        raise ConfigError(
            f"{file} has {size} bytes, its header promises {8 + num_bytes + end}", param=file.name
        )
    return header


def _tensors(header: bytes) -> dict[str, Any]:
    """Type, shape and place of each tensor, by name."""
    return {name: of for name, of in json.loads(header).items() if name != "__metadata__"}


def _end_of(tensor: dict[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    counts = [*tensor["shape"], begin, end]
    if not all(type(count) is int and count >= 0 for count in counts) or end < begin:
        raise ValueError(f"shape {tensor['shape']} at {begin} to {end}")
    if not isinstance(tensor["dtype"], str):
        raise TypeError(f"dtype {tensor['dtype']}")
    return int(end)


def _some_values(file: Path, header: bytes) -> bytes:
    values = bytearray()
    with file.open("rb") as stream:
        for _, tensor in sorted(_tensors(header).items()):
            begin, end = tensor["data_offsets"]
            middle = (begin + end) // 2
            stream.seek(8 + len(header) + middle)
            values += stream.read(min(VALUE_BYTES, end - middle))
    return bytes(values)
