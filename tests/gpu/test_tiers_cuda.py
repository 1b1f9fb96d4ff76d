"""Tiers of a pool in device memory: copies through a pinned buffer, there and back."""

from pathlib import Path

import pytest
import torch

from disagg.workers.pool_region import PoolRegion
from disagg.workers.tiers.pool_memory import PoolMemory
from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, pulled_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
LENGTH = 150
KEPT = 144
"""Tokens of its whole blocks."""


@pytest.mark.parametrize("num_parts", [1, 4])
def test_blocks_come_back_as_they_were(num_parts: int) -> None:
    memory = torch.randint(
        0, 256, (num_parts, NUM_BLOCKS, BLOCK_BYTES // num_parts), dtype=torch.uint8, device="cuda"
    )
    region = PoolRegion(
        memory.data_ptr(), NUM_BLOCKS, BLOCK_BYTES, "VRAM", 0, memory, num_parts=num_parts
    )
    pool, blocks = PoolMemory(region), [3, 1, 60]
    before = memory.clone()
    assert not pool.lends
    staging = pool.staging(len(blocks))
    views = pool.fetch(blocks, staging)
    for view, block in zip(views, blocks, strict=True):
        assert bytes(view) == before[:, block].contiguous().cpu().numpy().tobytes()
    memory.zero_()
    torch.cuda.synchronize()
    pool.place(list(enumerate(blocks)), staging)
    for block in range(NUM_BLOCKS):
        wanted = before[:, block] if block in blocks else torch.zeros_like(before[:, block])
        assert torch.equal(memory[:, block], wanted), block


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_only_a_tier_has_is_loaded(kind: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    options = {"device": "cuda", "max_step_tokens": 96, "max_model_tokens": 1024}
    router = {"pull_tokens_min": 64, "decode_prefill_tokens_max": 64, "worker_silent_ms": 60_000}
    tier = "host?size=64MiB" if kind == "host" else f"disk:{tmp_path}/store?size=64MiB"
    with running(Cluster(directory, tmp_path, options, router)) as cluster:
        cluster.spawn("p0", "prefill")
        cluster.spawn("d0", "decode", tiers=(tier,))
        cluster.wait_ready("p0", "d0")
        served = ServedModel(cluster)
        prompt = served.prompt(LENGTH, 6, salt=kind)
        (choice,) = served.ask(prompt, "first").choices
        assert choice.text == "".join(prompt.texts)
        (first,) = cluster.record("first")["generations"]
        assert pulled_bytes(first) > 0
        written = f"tier_blocks_written_{kind}"
        wait_until(lambda: cluster.counters("d0").get(written, 0), "writes to the tier")
        served.settle()
        for name in ("p0", "d0"):
            cluster.tell(name, "forget")
            cluster.tell(name, "poison")
        wait_until(lambda: not cluster.usable_tokens(prompt.prompt)["d0"], "an empty pool")
        (choice,) = served.ask(prompt, "again").choices
        assert choice.text == "".join(prompt.texts)
        assert cluster.counters("d0")["tier_loaded_tokens"] == KEPT
        served.settle()
