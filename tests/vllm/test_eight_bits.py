"""Quantized weights and fp8 KV, as vLLM loads them: near the model, and the same in every step."""

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.messages.sampling import SamplingParams
from disagg.workers.engines.checkpoint_files import read_weights
from disagg.workers.engines.choice import choose
from tests.checkpoints import make_checkpoint, reference_generate, reference_logits
from tests.vllm.engines import VLLM_SHAPE, make_vllm, vllm_options
from tests.vllm.quantized import quantize
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS = 5
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=0)
TOLERANCE = 0.35
"""Of logprobs: 8 bits of what is multiplied."""
KV_TOLERANCE = 1.0
"""Of the first token's, with keys and values of 8 bits: 3 of them are the fraction."""


def clear_prompt(directory: Path, length: int) -> tuple[list[int], list[int], list[float]]:
    """One whose reference tokens win by far."""
    for attempt in range(200):
        prompt = [(37 * i * (attempt + 1) + i * i + attempt) % 313 + 7 for i in range(length)]
        tokens, logprobs, gap = reference_generate(directory, prompt, NUM_TOKENS)
        if gap > 2 * TOLERANCE:
            return prompt, tokens, logprobs
    raise AssertionError("no clear prompt")


def answers(engine: Any, prompt: list[int]) -> list[tuple[list[int], list[float]]]:
    """In one piece, in chunks, and after a prefix hit."""
    whole, chunks = Serving(engine), Serving(engine, 37)
    for serving, name in ((whole, "whole"), (chunks, "chunks"), (chunks, "hit")):
        serving.submit(name, prompt, GREEDY)
        serving.run()
    assert chunks.first_starts(["chunks", "hit"]) == [0, 96]
    named = ((whole, "whole"), (chunks, "chunks"), (chunks, "hit"))
    return [(serving.tokens(name), serving.logprobs(name)) for serving, name in named]


def test_quantized_weights(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tiny", "qwen3", **VLLM_SHAPE)
    before = read_weights(directory)
    plain = quantize(directory)
    stored = read_weights(directory)
    assert stored.quantized
    assert stored.dtype == before.dtype == "float32"
    assert stored.bytes_in(4) == stored.num_bytes < before.bytes_in(4)
    refused = choose(vllm_options(directory, 100, engine="auto"))
    assert refused.name == "vllm"
    assert "quantization_config" in refused.without
    engine = make_vllm(directory, 100, dtype="bfloat16")
    prompt, tokens, logprobs = clear_prompt(plain, 120)
    for found, their_logprobs in answers(engine, prompt):
        assert found == tokens
        assert their_logprobs == pytest.approx(logprobs, abs=TOLERANCE)


def test_kv_of_eight_bits(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    whole = make_vllm(directory, 100)
    try:
        engine = make_vllm(directory, 100, kv_dtype="fp8")
    except ConfigError as refused:
        pytest.skip(refused.message)  # needs a CPU with AVX-512
    assert engine.layout.block_bytes * 4 == whole.layout.block_bytes
    assert "fp8" in engine.page_format
    assert engine.page_format != whole.page_format  # so the two never exchange KV
    prompt = [(37 * i + i * i) % 313 + 7 for i in range(120)]
    in_one, *others = answers(engine, prompt)
    plain = reference_logits(directory, prompt)[-1].log_softmax(-1)[in_one[0][0]]
    assert in_one[1][0] == pytest.approx(float(plain), abs=KV_TOLERANCE)
    assert in_one[1][0] != pytest.approx(float(plain), abs=1e-3)  # control: they are of 8 bits
    for found, their_logprobs in others:  # whatever was read back from the pool
        assert found == in_one[0]
        assert their_logprobs == pytest.approx(in_one[1], abs=1e-4)
