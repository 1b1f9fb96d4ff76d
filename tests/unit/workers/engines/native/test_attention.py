"""The attention function refuses what it would compute wrongly."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from disagg.scheduling.step import Step
from disagg.workers.engines.native.attention import AttentionArgumentError, paged_attention
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.native.packed_batch import PackedBatch
from tests.checkpoints import make_checkpoint
from tests.unit.workers.engines.native.sequences import Pool


class Layer(torch.nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> PackedBatch:
    engine = NativeEngine(make_checkpoint(tmp_path_factory.mktemp("m"), "gemma3"), num_blocks=32)
    pool = Pool(engine, random.Random(1))
    return engine.lay_out(Step(1, (pool.slice(pool.start("a", range(10, 15)), 5),)))


def call(batch: PackedBatch | None, layer: int = 0, **changes: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    arguments: dict[str, Any] = {
        "attention_mask": None,
        "scaling": 0.25,
        "sliding_window": 32,
        "disagg_batch": batch,
        "query": torch.randn(1, 4, 5, 16, generator=generator),
        "key": torch.randn(1, 2, 5, 16, generator=generator),
        "value": torch.randn(1, 2, 5, 16, generator=generator),
    }
    return paged_attention(Layer(layer), **(arguments | changes))[0]


def test_a_proper_call(batch: PackedBatch) -> None:
    assert call(batch).shape == (1, 5, 4, 16)
    assert call(batch, layer=5, sliding_window=None, position_ids=1).shape == (1, 5, 4, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_bias": torch.zeros(1)},
        {"is_causal": False},
        {"attention_mask": torch.ones(5, 5)},
        {"dropout": 0.1},
        {"sliding_window": 31},
        {"sliding_window": None},
        {"layer": 5},
        {"layer": -1},
        {"layer": 6},
        {"disagg_batch": None},
        {"query": torch.zeros(2, 4, 5, 16)},
        {"query": torch.zeros(1, 4, 4, 16)},
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(batch: PackedBatch, changes: dict[str, Any]) -> None:
    with pytest.raises(AttentionArgumentError):
        call(batch, **changes)


def test_a_model_without_windows_under_a_window_spec_is_refused(batch: PackedBatch) -> None:
    query, key = torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 5, 16)
    with pytest.raises(AttentionArgumentError, match="window"):
        paged_attention(Layer(0), query, key, key, None, scaling=0.25, disagg_batch=batch)


def test_a_model_that_is_called_without_a_batch_fails(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path, "qwen3"),
        attn_implementation="disagg_paged",
        local_files_only=True,
    )
    with pytest.raises(AttentionArgumentError):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
