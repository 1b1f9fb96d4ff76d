"""On which GPUs the roles of a test compute, and why a layout is skipped."""

from typing import Any

import pytest
import torch

from tests.process.network import Place

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


def layout(name: str, prefill: str, decode: str, num_ranks: int = 1) -> Any:
    """A parameter: ranks of a worker, and each role's place, which sees those GPUs alone."""
    needed = 1 + max(int(index) for index in f"{prefill},{decode}".split(","))
    places = {
        worker: Place(environment={"CUDA_VISIBLE_DEVICES": devices})
        for worker, devices in (("p0", prefill), ("d0", decode))
    }
    reason = f"CUDA devices: it takes {needed}, torch finds {NUM_DEVICES}"
    return pytest.param(
        num_ranks, places, id=name, marks=pytest.mark.skipif(needed > NUM_DEVICES, reason=reason)
    )


LAYOUTS = [layout("both-roles-on-one", "0", "0"), layout("a-gpu-per-role", "0", "1")]
RANKED_LAYOUTS = [
    layout("both-roles-on-two-ranks", "0,1", "0,1", 2),
    layout("two-ranks-per-role", "0,1", "2,3", 2),
]
