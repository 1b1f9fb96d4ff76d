"""A layout's version names what lies where: no release changes one without the other."""

import hashlib
import json
from pathlib import Path

import pytest

from disagg.kv.shapes import layout
from disagg.kv.shapes.layout import LAYOUT_VERSION, KVCacheLayout, plan_layout
from disagg.kv.shapes.model_shapes import read_shape
from disagg.kv.shapes.whole_states import plan_whole_states

CONFIGS = Path(__file__).parents[3] / "data" / "model_configs"
MODELS = (
    "gemma-3-27b",
    "gemma-3-4b",
    "gpt-oss-120b",
    "jamba-v0.1",
    "llama-4-scout",
    "mistral-7b-v0.1",
    "nemotron-nano-9b-v2",
    "qwen3-next-80b-a3b",
)
DIGESTS = {1: "0ca993e60adaddcc"}
"""Per version what `digest` gives. A new version gets a new line; none is ever changed."""


def places(planned: KVCacheLayout) -> str:
    """Which layers share a block, and where each one's page lies in it."""
    lines = [f"{planned.block_bytes} {planned.hash_block_tokens}"]
    for group in planned.groups:
        lies = [(layer, planned.page_offset(layer)) for layer in group.layers]
        lines.append(f"{group.spec.kind} {group.spec.page_bytes} {group.blocks_per_state} {lies}")
    return "\n".join(lines)


def digest() -> str:
    """Of every layout of the released models' configurations, for either engine."""
    found = hashlib.sha256()
    for model in MODELS:
        config = json.loads((CONFIGS / f"{model}.json").read_text())
        specs = read_shape(config).layer_specs
        for planned in (plan_layout(specs), plan_whole_states(specs)):
            found.update(f"{model}\n{places(planned)}\n".encode())
    return found.hexdigest()[:16]


def test_the_layouts_are_those_of_this_version() -> None:
    said = "layouts differ from those of their version: raise LAYOUT_VERSION, add a line to DIGESTS"
    assert digest() == DIGESTS[LAYOUT_VERSION], said


def test_another_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SPARE_SHARE", 2)
    assert digest() != DIGESTS[LAYOUT_VERSION]
