"""Time to the first token of a prompt that comes back from a tier, beside computing it again.

A whole worker (session, control, core, native engine, tier) whose pool holds one prompt: two of
them take turns, so each finds itself evicted by the other.
"""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.engine.checkpoint import CHECKPOINT, VOCAB_SIZE, WINDOW_TOKENS, make_checkpoint
from benchmarks.transfer.figures import MS, figure
from disagg.workers.options import WorkerOptions
from disagg.workers.worker import Worker
from tests.unit.workers.lone_worker import Answer, NoTransport, ask, until_written

LENGTHS, QUICK_LENGTHS = (1_024, 2_048, 4_096, 8_000), (1_024, 2_048)
TIERS = {"host": "host?size=1GiB", "disk": "disk:{place}/kv?size=1GiB"}
BLOCK_TOKENS = 32
STEP_TOKENS = 256
NUM_WINDOW_GROUPS = 5
TIMEOUT_S = 300.0


def measure(
    folder: Path,
    rounds: int,
    lengths: Sequence[int] = LENGTHS,
    checkpoint: Path = CHECKPOINT,
    vocab_size: int = VOCAB_SIZE,
) -> None:
    """Print a figure per tier and length."""
    make_checkpoint(checkpoint)
    for kind, setting in TIERS.items():
        for length in lengths:
            with tempfile.TemporaryDirectory(dir=folder, prefix="first-token-") as place:
                tier = setting.format(place=place)
                cold, again = _rounds(kind, tier, checkpoint, vocab_size, length, rounds)
            found = min(answer.found_tokens for answer in again)
            figure(
                f"tiers/first token/{kind}/{length} tokens",
                [answer.first_token_s * MS for answer in again],
                [answer.first_token_s * MS for answer in cold],
                unit="ms",
                target=None,
                peer_name="the same prompts computed",
                note=f"{found} of {length} tokens reloaded; native engine, Gemma 3 of 63 M "
                "parameters, float32, 1 thread, whole worker without a router",
            )


def _rounds(
    kind: str, tier: str, checkpoint: Path, vocab_size: int, length: int, rounds: int
) -> tuple[list[Answer], list[Answer]]:
    rng = random.Random(length)
    prompts = []
    for _ in range(rounds + 1):
        pair = [tuple(rng.randrange(4, vocab_size) for _ in range(length)) for _ in range(2)]
        prompts += pair + pair
    worker = Worker(
        _options(tier, checkpoint, length),
        transport_factory=lambda *_: cast(Any, NoTransport()),
    )
    worker.start()
    try:
        # Until all is written: or the next prompt evicts what waits for it.
        answers = asyncio.run(ask(worker, prompts, settle=until_written, timeout_s=TIMEOUT_S))
        assert worker.control is not None
        num_read = worker.control.core.counters.counts.get(f"tier_blocks_read_{kind}", 0)
    finally:
        if not worker.stop():
            raise TimeoutError("the worker does not stop")
    cold, again = [], []
    for first in range(4, len(answers), 4):  # the first round warms up
        cold += answers[first : first + 2]
        again += answers[first + 2 : first + 4]
    for before, after in zip(cold, again, strict=True):
        if before.token_ids != after.token_ids or before.found_tokens:
            raise AssertionError(f"{before} and then {after}")
        if after.found_tokens < length - STEP_TOKENS:
            raise AssertionError(f"only {after.found_tokens} of {length} tokens were found")
    if num_read < len(answers) // 2 * (length - STEP_TOKENS) // BLOCK_TOKENS:
        raise AssertionError(f"only {num_read} blocks came from the tier")
    return cold, again


def _options(tier: str, checkpoint: Path, length: int) -> WorkerOptions:
    window_blocks = (WINDOW_TOKENS + 2 * STEP_TOKENS) // BLOCK_TOKENS + 2
    return WorkerOptions(
        worker_id="benchmark",
        role="both",
        model_dir=str(checkpoint),
        model_name="model",
        router_addresses=(),
        engine="native",
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_blocks=length // BLOCK_TOKENS + NUM_WINDOW_GROUPS * window_blocks + 8,
        block_tokens=BLOCK_TOKENS,
        max_step_tokens=STEP_TOKENS,
        tiers=(tier,),
        hash_key="the secret of a benchmark's only worker",
    )
