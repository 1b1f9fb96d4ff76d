"""In half precision the engine runs, stays near the fp32 reference, and still sees poison."""

import random
from pathlib import Path

import pytest
import torch

from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint, reference_logits
from tests.tiny_families import FAMILIES
from tests.unit.workers.engines.native.sequences import Pool, forward_all, run_one, seen


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bfloat16(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family)
    engine = NativeEngine(directory, num_blocks=100, dtype="bfloat16")
    prompt = [(37 * i + 11) % 313 + 7 for i in range(70)]
    pool = Pool(engine, random.Random(1))
    seq = pool.start("a", prompt)
    (first,) = forward_all(engine, [pool.slice(seq, 40)])
    seq.computed = 40
    (rest,) = forward_all(engine, [pool.slice(seq, 30)])
    expected = reference_logits(directory, prompt)
    alike = torch.nn.functional.cosine_similarity(torch.cat((first, rest)), expected)
    shuffled = torch.nn.functional.cosine_similarity(torch.cat((rest, first)), expected)
    assert float(alike.median()) > 0.99
    assert float(shuffled.median()) < 0.9  # control
    seq.computed = 69
    part = pool.slice(seq, 1)
    assert run_one(engine, part) == ""
    engine.pool.poison([seq.tables[0][seen(engine.layout.groups[0], 69)]])
    assert "NonFiniteError" in run_one(engine, part)
