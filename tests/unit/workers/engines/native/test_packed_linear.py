"""Packed weights: the same products, the plain ones gone, whatever reads them still served."""

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.native.packed_linear import PackedLinear, pack_linears
from tests.checkpoints import make_checkpoint, reference_logits
from tests.unit.workers.engines.native.sequences import Pool, forward_all

DTYPES = (torch.float32, torch.bfloat16)


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (7, 1), (5, 33), (300, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal(dtype: torch.dtype, inputs: int, outputs: int, *, bias: bool) -> None:
    plain = linear(inputs, outputs, dtype, bias=bias)
    packed = PackedLinear(plain)
    bound = 1e-5 if dtype is torch.float32 else 0.02
    for num_rows in (0, 1, 2, 3, 4, 7, 16, 65, 512):
        rows = torch.randn(1, num_rows, inputs, dtype=dtype)
        torch.testing.assert_close(packed(rows), plain(rows), rtol=bound, atol=bound)
    strided = torch.randn(4, 6, inputs, dtype=dtype)[:, ::2]
    torch.testing.assert_close(packed(strided), plain(strided), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_weights_can_be_read(dtype: torch.dtype) -> None:
    """Some models multiply by ``layer.weight`` themselves."""
    plain = linear(48, 80, dtype)
    assert torch.equal(PackedLinear(plain).weight, plain.weight)


class Derived(nn.Linear):
    """Computes something else than a linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Model(nn.Module):
    """A tied head, a derived layer, one of a type that oneDNN has not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.layers: Any = nn.ModuleList([linear(64, 64, torch.float32) for _ in range(3)])
        self.derived = Derived(64, 64, bias=False)
        self.wide = linear(64, 64, torch.float64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embed.weight


def test_what_is_packed_and_what_is_not() -> None:
    model = Model()
    tied, derived, wide = model.embed.weight, model.derived, model.wide
    summary = pack_linears(model)
    assert summary.startswith("4 of 5 linear layers packed (wide: ")
    assert model.derived is derived
    assert model.wide is wide
    assert model.embed.weight is tied
    assert isinstance(model.head, PackedLinear)
    assert torch.equal(model.head.weight, tied)
    assert pack_linears(model).startswith("0 of 1 ")  # what is packed is no linear layer


def test_memory_does_not_double() -> None:
    model = Model()
    plain = [weakref.ref(layer.weight) for layer in model.layers]
    tied = weakref.ref(model.embed.weight)
    num_bytes = sum(layer.weight.nbytes for layer in model.layers)
    pack_linears(model)
    gc.collect()
    assert all(ref() is None for ref in plain)
    assert tied() is not None  # control: the embeddings need theirs
    packed = [torch.ops.mkldnn._nbytes(layer._packed) for layer in model.layers]
    assert sum(packed) == num_bytes


def test_a_tied_head_gives_the_reference_logits(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma3", tie_word_embeddings=True)
    engine = NativeEngine(directory, num_blocks=100)
    assert "43 of 43 linear layers packed" in engine.summary
    prompt = [(37 * i + 11) % 313 + 7 for i in range(70)]
    pool = Pool(engine, random.Random(1))
    (logits,) = forward_all(engine, [pool.slice(pool.start("a", prompt), len(prompt))])
    assert float((logits - reference_logits(directory, prompt)).abs().max()) < 1e-4


def test_the_engine_says_how_many(tmp_path: Path) -> None:
    for family, text in (("llama", "22 of 22"), ("gpt_oss", "17 of 17")):
        engine = NativeEngine(make_checkpoint(tmp_path / family, family), num_blocks=10)
        assert f"{text} linear layers packed" in engine.summary
