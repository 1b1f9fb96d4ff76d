"""The best token of rows, as torch finds it."""

import pytest
import torch

from disagg.workers.engines.best_tokens import best_token


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 320, 32_000])
def test_equals_torch(vocab_size: int) -> None:
    rows = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert torch.equal(best_token(rows), rows.argmax(-1))
    assert torch.equal(best_token(rows[::2]), rows[::2].argmax(-1))
    assert best_token(rows[:0]).tolist() == []


def test_of_equals_the_first() -> None:
    rows = torch.zeros(3, 1_000)
    rows[1, 70:90] = 1
    rows[2] = -1
    assert best_token(rows).tolist() == [0, 70, 0]
