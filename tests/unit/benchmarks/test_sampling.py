"""The sampling benchmark: both sides draw from the same distribution; its lines."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.sampling.__main__ import figures
from benchmarks.sampling.cases import by_sorting
from disagg.messages.sampling import SamplingParams
from disagg.workers.engines.sampler import sample

NUM_DRAWS = 20_000


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.6}, {"top_k": 5}, {"top_k": 9, "top_p": 0.5}])
def test_the_peer_draws_as_we_do(limits: dict[str, Any]) -> None:
    torch.manual_seed(1)
    row = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 2
    param = replace(SamplingParams(1, temperature=0.8), **limits)
    given = [param] * NUM_DRAWS
    rows = row.expand(NUM_DRAWS, -1)
    ours = [token.token_id for token in sample(rows, given, range(NUM_DRAWS))]
    peer = by_sorting(rows, given)
    plain = by_sorting(rows, [SamplingParams(1, temperature=0.8)] * NUM_DRAWS)

    def shares(tokens: list[int]) -> torch.Tensor:
        return torch.bincount(torch.tensor(tokens), minlength=40) / NUM_DRAWS

    assert float((shares(ours) - shares(peer)).abs().sum()) / 2 < 0.03
    if limits:  # control: another distribution is seen
        assert float((shares(ours) - shares(plain)).abs().sum()) / 2 > 0.03


def test_a_line_per_case_and_peer() -> None:
    lines = list(figures(640, rounds=1))
    greedy = [line for line in lines if line["target"] is not None]
    assert len(greedy) * 2 == len(lines) >= 14
    assert all(line["ok"] == (float(str(line["ratio"])) >= 0.5) for line in greedy)
    assert all(line["ok"] is None for line in lines if line["target"] is None)
