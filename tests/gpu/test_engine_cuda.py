"""The engine on a CUDA device: the same equality as on the CPU, and what only a device can show."""

import random
from pathlib import Path

import pytest
import torch

from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint, reference_logits
from tests.tiny_families import FAMILIES
from tests.unit.workers.engines.native.sequences import Pool, forward_all, generate, run_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

WINDOW = 32
TOLERANCE = 1e-3
"""Wider than on the CPU: device and reference multiply in different orders."""
PROMPT_LENGTHS = (1, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 7 * WINDOW + 3)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_chunks_equal_the_plain_forward(family: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    directory = make_checkpoint(tmp_path, family, window=WINDOW)
    engine = NativeEngine(directory, num_blocks=600, device="cuda")
    prompts = [[rng.randrange(7, 320) for _ in range(length)] for length in PROMPT_LENGTHS]
    for seq in generate(engine, prompts, num_tokens=8, rng=rng):
        expected = reference_logits(directory, seq.tokens[:-1])
        actual = torch.stack([seq.logits[position] for position in range(len(seq.tokens) - 1)])
        assert float((expected - actual).abs().max()) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_sees_poison(dtype: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma3", window=WINDOW)
    engine = NativeEngine(directory, num_blocks=100, device="cuda", dtype=dtype)  # type: ignore[arg-type]
    pool = Pool(engine, random.Random(1))
    seq = pool.start("a", [(37 * i + 11) % 313 + 7 for i in range(100)])
    assert run_one(engine, pool.slice(seq, 60)) == ""
    seq.computed = 60
    assert run_one(engine, pool.slice(seq, 40)) == ""
    engine.pool.poison([seq.tables[0][-1]])
    seq.computed = 99
    assert "NonFiniteError" in run_one(engine, pool.slice(seq, 1))


def test_a_window_off_by_one_is_detected(tmp_path: Path) -> None:
    """Control: the tolerance is narrow enough to see one token more or less."""
    right = make_checkpoint(tmp_path / "right", "gemma3", window=WINDOW)
    wrong = make_checkpoint(tmp_path / "wrong", "gemma3", window=WINDOW + 1)
    first = open_checkpoint(wrong).layer_specs(block_tokens=16, dtype_bytes=4)[0]
    assert first is not None
    assert first.window_tokens == WINDOW + 1
    engine = NativeEngine(wrong, num_blocks=100, device="cuda")
    prompt = [(37 * i + 11) % 313 + 7 for i in range(100)]
    pool = Pool(engine, random.Random(9))
    (logits,) = forward_all(engine, [pool.slice(pool.start("a", prompt), 100)])
    assert float((logits - reference_logits(right, prompt)).abs().max()) > 2 * TOLERANCE
