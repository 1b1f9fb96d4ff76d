"""The checkpoint that both systems serve: the demo's, with attention heads as wide as vLLM takes.

vLLM's attention on the CPU takes heads of 32 and more, the demo's have 16. A head is made wider
with zeros: what the model computes stays the same.
"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.checkpoint import MARKER

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / ".cache" / "demo-checkpoint"
DIRECTORY = ROOT / ".cache" / "bench-stale-reads" / "checkpoint"
HEAD_SIZE = 32


def make_checkpoint() -> Path:
    """Train the demo's checkpoint if it is missing (minutes of one core) and write the wide one."""
    train = [sys.executable, "-m", "demo.train", "--out", str(DEMO)]
    if subprocess.run(train, cwd=ROOT, stdout=sys.stderr).returncode:
        sys.exit("the checkpoint could not be made; the reason is above")
    widen(DEMO, DIRECTORY)
    return DIRECTORY


def widen(narrow: Path, wide: Path) -> None:
    """Write the checkpoint ``narrow`` with wider heads to ``wide``, unless it is there already."""
    if (wide / MARKER).exists() and (wide / MARKER).read_bytes() == (narrow / MARKER).read_bytes():
        return
    shutil.copytree(narrow, wide, ignore=shutil.ignore_patterns(MARKER), dirs_exist_ok=True)
    config = json.loads((narrow / "config.json").read_text())
    weights = widen_heads(load_file(narrow / "model.safetensors"), config["head_dim"])
    save_file(weights, wide / "model.safetensors", metadata={"format": "pt"})
    (wide / "config.json").write_text(json.dumps(config | {"head_dim": HEAD_SIZE}, indent=2))
    shutil.copy(narrow / MARKER, wide / MARKER)  # last: it says that the rest is there


def widen_heads(weights: dict[str, Tensor], head_size: int) -> dict[str, Tensor]:
    """Weights of a Gemma 3 with heads of ``HEAD_SIZE`` that computes the same.

    The two halves of a head are rotated against each other, by an angle that falls with the
    dimension: one of half as many dimensions has every second angle, so these are the places that
    are filled. Half of a head being zero halves its mean square, which its norm's weight undoes.
    """
    factor = HEAD_SIZE // head_size
    half = torch.arange(head_size // 2) * factor
    places = torch.cat([half, half + HEAD_SIZE // 2])

    def wide(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # Gemma multiplies by 1 + weight
            out = torch.zeros(HEAD_SIZE)
            out[places] = (1 + tensor) / math.sqrt(factor) - 1
            return out
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            heads = tensor.view(-1, head_size, tensor.shape[1])
            out = torch.zeros(heads.shape[0], HEAD_SIZE, tensor.shape[1])
            out[:, places] = heads
            return out.flatten(0, 1)
        if name.endswith("o_proj.weight"):
            heads = tensor.view(tensor.shape[0], -1, head_size)
            out = torch.zeros(*heads.shape[:2], HEAD_SIZE)
            out[..., places] = heads
            return out.flatten(1)
        return tensor

    return {name: wide(name, tensor).contiguous() for name, tensor in weights.items()}
