"""The hand-over with KV in device memory: NIXL moves it from one worker's pool to the other's."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint, reference_generate
from tests.gpu.devices import LAYOUTS
from tests.process.harness import MODEL, Cluster, running
from tests.process.network import Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

WINDOW = 32
NUM_TOKENS = 12
TOLERANCE = 1e-3
"""Wider than on the CPU: device and reference multiply in different orders."""


@pytest.mark.parametrize(("num_ranks", "places"), LAYOUTS)
@pytest.mark.parametrize(
    ("family", "checksums"),
    [
        ("gemma3", False),
        ("mistral", False),
        ("qwen3", False),
        ("gpt_oss", False),
        ("llama4", False),
        ("deepseek_v3", False),
        ("nemotron_h", False),
        ("qwen3_next", False),
        ("gemma3", True),
    ],
)
def test_a_handed_over_request_equals_one_process(
    family: str, checksums: bool, num_ranks: int, places: Mapping[str, Place], tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / family, family, window=WINDOW)
    options = {"device": "cuda", "checksums": checksums, "tensor_parallel": num_ranks}
    cluster = Cluster(directory, tmp_path, options, places=dict(places))
    with running(cluster, p0="prefill", d0="decode"):
        for length in (WINDOW - 1, WINDOW, WINDOW + 1, 7 * WINDOW + 3):
            prompt = [1, *(20 + i * 37 % 200 for i in range(length - 1))]
            _, expected, _ = reference_generate(directory, prompt, NUM_TOKENS)
            answer = cluster.client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=NUM_TOKENS,
                temperature=0,
                logprobs=0,
                extra_headers={"X-Request-Id": f"{family}-{length}"},
            )
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.token_logprobs == pytest.approx(
                expected, abs=TOLERANCE
            )
            (only,) = cluster.record(f"{family}-{length}")["generations"]
            assert sum(group["pulled_bytes"] for group in only["transfer"]["groups"]) > 0
        cluster.wait_quiescent()
