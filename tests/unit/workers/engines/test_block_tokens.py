"""How many tokens a block has where the setting says so, and where it does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.workers.engines.block_tokens import fitting_block_tokens, planned_block_tokens
from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.plan import plan_native
from disagg.workers.options import AUTO, WorkerOptions
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("engine", "device", "needed"),
    [("native", "cpu", 16), ("native", "cuda", 16), ("vllm", "cpu", 32), ("vllm", "cuda", 16)],
)
def test_auto_is_what_the_engine_needs(engine: str, device: str, needed: int) -> None:
    assert planned_block_tokens(engine, device, AUTO) == needed
    assert planned_block_tokens(engine, device, 4 * needed) == 4 * needed
    assert planned_block_tokens("native", device, 2) == 2


def test_one_that_does_not_fit_is_refused_with_one_that_would() -> None:
    with pytest.raises(ConfigError) as caught:
        fitting_block_tokens(32, lambda tokens: tokens == 64, "the kernel", "64")
    assert caught.value.param == "worker.block_tokens"
    assert caught.value.message == (
        "worker.block_tokens: the kernel takes 64, not 32; 64 would do, which auto chooses"
    )
    assert fitting_block_tokens(AUTO, lambda tokens: tokens == 64, "the kernel", "64") == 64
    with pytest.raises(ConfigError, match=r"the kernel takes nothing, not 32$"):
        fitting_block_tokens(32, lambda _: False, "the kernel", "nothing")


def test_the_native_engine_takes_any(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "qwen3"))
    options = WorkerOptions("w", "both", str(tmp_path), "tiny", (), device="cpu", num_blocks=8)
    plans = [plan_native(replace(options, block_tokens=n), checkpoint) for n in (8, 16, 64)]
    assert [plan.block_tokens for plan in plans] == [8, 16, 64]
    assert plan_native(options, checkpoint) == plans[1]
