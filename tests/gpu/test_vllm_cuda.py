"""The vLLM engine on a CUDA device: graphs, quantized weights, fp8 KV, two ranks, the hand-over."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.messages.sampling import SamplingParams
from disagg.workers.pool_region import PoolRegion
from tests.checkpoints import make_checkpoint, reference_generate, reference_logits
from tests.gpu.devices import LAYOUTS, RANKED_LAYOUTS
from tests.process.harness import Cluster, running
from tests.process.network import Place
from tests.process.served_model import ServedModel, pulled_bytes
from tests.vllm.engines import make_vllm
from tests.vllm.families import NEMOTRON_H
from tests.vllm.quantized import quantize
from tests.vllm.serving import Serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SHAPE: dict[str, Any] = {"head_dim": 64}
WINDOW = 48
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=0)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.95, seed=3)
TOLERANCE = 0.25
"""Of logprobs in 16 bits beside float32."""
KV_TOLERANCE = 1.0
"""Of the first token's, with keys and values of 8 bits."""
LENGTHS = (1, 15, 16, 17, WINDOW, 7 * WINDOW + 3)
CUDA: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "workers_per_gpu": 2,
}


def clear_prompts(directory: Path) -> dict[str, tuple[list[int], list[int], list[float]]]:
    """Prompts whose reference tokens win by far, by name."""
    found = {}
    for length in LENGTHS:
        for attempt in range(300):
            prompt = [(37 * i * (attempt + 1) + i * i + attempt) % 313 + 7 for i in range(length)]
            tokens, logprobs, gap = reference_generate(directory, prompt, NUM_TOKENS)
            if gap > 2 * TOLERANCE:
                found[str(length)] = (prompt, tokens, logprobs)
                break
    assert len(found) > len(LENGTHS) // 2
    return found


def check(engine: Any, reference: Path, max_step_tokens: int = 37) -> dict[str, list[int]]:
    """Chunked, packed and after prefix hits; returns what was drawn at temperature 1."""
    expected = clear_prompts(reference)
    serving = Serving(engine, max_step_tokens)
    for suffix in ("", "-again"):
        for name, (prompt, _, _) in expected.items():
            serving.submit(name + suffix, prompt, GREEDY)
            serving.submit(f"{name}-sampled{suffix}", prompt, SAMPLED)
        serving.run()
        for name, (_, tokens, logprobs) in expected.items():
            assert serving.tokens(name + suffix) == tokens
            assert serving.logprobs(name + suffix) == pytest.approx(logprobs, abs=TOLERANCE)
    drawn = {name: serving.tokens(f"{name}-sampled") for name in expected}
    assert drawn == {name: serving.tokens(f"{name}-sampled-again") for name in expected}
    return drawn


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen3", "gpt_oss", "llama"])
def test_equal_to_the_model(family: str, cuda_graphs: bool, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family, window=WINDOW, **SHAPE)
    engine = make_vllm(directory, 400, cuda_graphs=cuda_graphs, **CUDA)
    assert engine.pool.is_cuda
    assert isinstance(engine.region, PoolRegion)
    assert engine.region.memory_kind == "VRAM"
    assert engine.region.num_parts == 1  # block-major, as FlashAttention's and Triton's kernels are
    check(engine, directory)
    assert bool((engine.pool[NULL_BLOCK] == -1).all())  # nobody wrote through a null entry


def test_in_single_precision(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma3", window=WINDOW, **SHAPE)
    check(make_vllm(directory, 400, **(CUDA | {"dtype": "float32"})), directory)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_states(cuda_graphs: bool, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, NEMOTRON_H, head_dim=64)
    check(make_vllm(directory, 200, cuda_graphs=cuda_graphs, **CUDA), directory)


def test_a_null_block_fails_its_step_under_graphs(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    engine = make_vllm(directory, 100, **CUDA)
    serving = Serving(engine)
    serving.submit("spoiled", [(7 * i) % 301 + 8 for i in range(60)], GREEDY)
    assert serving.step() == ""
    assert serving.step() == ""
    engine.pool.fill_(-1)
    assert "not finite" in serving.step()
    serving = Serving(engine)  # and nobody after it
    serving.submit("after", [(7 * i) % 301 + 8 for i in range(60)], GREEDY)
    serving.run()


def test_quantized_weights(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tiny", "qwen3", **SHAPE)
    plain = quantize(directory)
    check(make_vllm(directory, 400, **CUDA), plain)


def test_kv_of_eight_bits(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    whole = make_vllm(directory, 400, **CUDA)
    engine = make_vllm(directory, 400, kv_dtype="fp8", **CUDA)
    assert engine.layout.block_bytes * 2 == whole.layout.block_bytes
    assert engine.page_format != whole.page_format
    prompt = [(37 * i + i * i) % 313 + 7 for i in range(200)]
    serving = Serving(engine)
    for name in ("cold", "hit"):
        serving.submit(name, prompt, GREEDY)
        serving.run()
    plain = reference_logits(directory, prompt)[-1].log_softmax(-1)[serving.tokens("cold")[0]]
    assert serving.logprobs("cold")[0] == pytest.approx(float(plain), abs=KV_TOLERANCE)
    assert serving.tokens("hit") == serving.tokens("cold")
    assert serving.first_starts(["cold", "hit"]) == [0, 192]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no second CUDA device")
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma3", window=WINDOW, **SHAPE)
    drawn = [
        check(make_vllm(directory, 400, tensor_parallel=num_ranks, **CUDA), directory)
        for num_ranks in (1, 2)
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.cluster
@pytest.mark.parametrize(("num_ranks", "places"), [*LAYOUTS, *RANKED_LAYOUTS])
def test_handed_over_in_device_memory(
    num_ranks: int, places: Mapping[str, Place], tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW, **SHAPE)
    options = CUDA | {
        "engine": "vllm",
        "num_blocks": 400,
        "max_model_tokens": 1024,
        "max_step_tokens": 96,
        "tensor_parallel": num_ranks,
    }
    cluster = Cluster(
        directory, tmp_path, options, {"worker_silent_ms": 120_000}, places=dict(places)
    )
    with running(cluster):
        cluster.spawn("p0", "prefill")
        cluster.spawn("d0", "decode")
        cluster.wait_ready("p0", "d0")
        served = ServedModel(cluster)
        drawn = (served.prompt(length, 5, salt="cuda") for length in range(20, 300, 5))
        clear = [expected for expected in drawn if expected.min_gap > 2 * TOLERANCE][:6]
        assert len(clear) > 3
        moved = 0
        for expected in clear:
            request_id = served.new_id()
            (choice,) = served.ask(expected, request_id).choices
            assert choice.text == "".join(expected.texts)
            (only,) = cluster.record(request_id)["generations"]
            moved += pulled_bytes(only)
        assert moved > 0
        cluster.wait_quiescent()
