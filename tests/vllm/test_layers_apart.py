"""Where vLLM's kernels take each layer's blocks as one piece of memory, a block lies in parts."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.messages.sampling import SamplingParams
from tests.checkpoints import make_checkpoint, reference_generate
from tests.vllm import families
from tests.vllm.engines import VLLM_SHAPE, make_vllm
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_BLOCKS, NUM_LAYERS = 60, 3
PAGE_BYTES = 2 * 2 * 32 * 32 * 4
GREEDY = SamplingParams(max_tokens=8, num_logprobs=0)
PROMPT = [(11 * i + i * i) % 301 + 8 for i in range(150)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vllm"), "qwen3", **VLLM_SHAPE)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Any]:
    """The CPU's kernels read any stride; here they count as some that do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("disagg.workers.engines.vllm.kv_layout.TAKES_STRIDES", set())
        yield make_vllm(directory, NUM_BLOCKS)


def test_layers_are_far_apart(engine: Any) -> None:
    assert engine.region.num_parts == NUM_LAYERS
    assert engine.region.part_bytes == PAGE_BYTES
    assert engine.region.block_bytes == engine.layout.block_bytes == NUM_LAYERS * PAGE_BYTES
    assert engine.pool.shape == (NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES)
    assert engine.pool.stride() == (PAGE_BYTES, NUM_BLOCKS * PAGE_BYTES, 1)
    assert engine.page_format.endswith(f"; {NUM_LAYERS} parts")
    config = engine.runner._worker.vllm_config.compilation_config
    layers = config.static_forward_context.values()
    for view in (layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")):
        assert view.is_contiguous()  # a layer's blocks, one after the other


def test_it_answers_as_the_model(engine: Any, directory: Path) -> None:
    tokens, logprobs, gap = reference_generate(directory, PROMPT, 8)
    assert gap > 1e-3
    engine.pool.fill_(-1)
    serving = Serving(engine, max_step_tokens=37)
    serving.submit("cold", PROMPT, GREEDY)
    serving.run()
    serving.submit("hit", PROMPT, GREEDY)
    serving.run()
    for name in ("cold", "hit"):
        assert serving.tokens(name) == tokens
        assert serving.logprobs(name) == pytest.approx(logprobs, abs=1e-4)
    assert serving.first_starts(["cold", "hit"]) == [0, 128]


def test_where_layers_lie_apart(engine: Any) -> None:
    """Forms as FlashAttention, Triton and FlashInfer offer them; those that begin with B or L."""
    from disagg.workers.engines.vllm.kv_layout import choose_form

    layout, forms = engine.layout, ["LBNHC", "LBHNC", "BHLNC", "BLNHC", "BLHNC"]
    assert choose_form(layout, forms, {"FLASH_ATTN"}, True) == ("BLNHC", 1)
    # Pages of the kernel's size lie one after the other in a layer alone.
    assert choose_form(layout, forms, {"FLASHINFER"}, False) == ("LBNHC", NUM_LAYERS)
    assert choose_form(layout, ["LBHNC"], {"FLEX_ATTENTION"}, True) == ("LBHNC", NUM_LAYERS)
    with pytest.raises(ConfigError, match="takes each layer's blocks as one piece"):
        choose_form(layout, ["BLHNC"], {"FLASHINFER"}, False)


def test_kernels_with_smaller_blocks_are_told_apart() -> None:
    from disagg.workers.engines.vllm.kernel_checks import takes_whole_blocks

    def layers(*sizes: int) -> dict[str, Any]:
        backend = SimpleNamespace(get_supported_kernel_block_sizes=lambda spec: list(sizes))
        return {"attention": SimpleNamespace(get_attn_backend=lambda: backend)}

    specs = {"attention": SimpleNamespace(head_size=64, block_size=64), "state": object()}
    assert takes_whole_blocks(layers(16, 32, 64), specs)
    assert not takes_whole_blocks(layers(16, 32), specs)


def test_pages_of_several_sizes_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("disagg.workers.engines.vllm.kv_layout.TAKES_STRIDES", set())
    checkpoint = make_checkpoint(tmp_path, families.NEMOTRON_H)
    with pytest.raises(ConfigError, match="CPU_ATTN takes each layer's blocks as one piece"):
        make_vllm(checkpoint, NUM_BLOCKS)
