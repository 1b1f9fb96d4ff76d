"""What writing to a tier costs the engine: decode steps beside those with nothing written.

Written is as much as the engine would make if it did nothing but compute prompts, which is the most
that lasts; then ten times as much.
"""

import asyncio
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.engine.__main__ import prompts
from benchmarks.engine.checkpoint import CHECKPOINT, make_checkpoint
from benchmarks.engine.ours import Ours
from benchmarks.engine.subject import Bounds
from benchmarks.transfer.figures import MS, figure
from disagg.messages.registration import Contract
from disagg.scheduling.actions import TierKey
from disagg.workers.pool_region import PoolRegion
from disagg.workers.tiers.copies import TierCopies
from disagg.workers.tiers.kinds import open_tiers

MIB = 1 << 20
WRITE_EVERY_S = 0.05
TIER_BYTES = 512 * MIB
"""The oldest blocks go out meanwhile, as in a tier that has been in use for a while."""
NUM_BLOCKS = 2_000
BATCH, CONTEXT = 4, 256
PROMPT_TOKENS = 2_048
TARGET = 1 / 1.1
WAIT_S = 60.0


class Writer:
    """Writes blocks of a pool to a tier at a given rate, its ends reported to a loop of its own.

    Args:
        kind: of the tier, as in its setting.
        region: the pool that is written from.
        num_blocks: written each time.
    """

    def __init__(self, kind: str, region: PoolRegion, num_blocks: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()
        contract = Contract(
            "benchmark", "int8", ("bytes",), "plain", region.block_bytes, 16, "sha256", 1, 1
        )
        opened = open_tiers([f"{kind}?size={TIER_BYTES}&slow_ms=60000"], contract)
        self._tier = opened[0][1].name
        self._num_blocks = num_blocks
        self.num_bytes = 0
        self._block_bytes = region.block_bytes
        self._number = 0
        self._ended = threading.Event()
        self.copies = TierCopies(opened, region, self._written, lambda *_: None, self._loop)

    def run(self, stop: threading.Event) -> None:
        """Write every `WRITE_EVERY_S` until told to stop; each block under a key of its own."""
        begin_s, times = time.monotonic(), 0
        while not stop.is_set():
            time.sleep(max(0.0, begin_s + times * WRITE_EVERY_S - time.monotonic()))
            times += 1
            self._ended.clear()
            blocks = [(self._next_key(), block) for block in range(self._num_blocks)]
            self._loop.call_soon_threadsafe(
                self.copies.submit_write, self._number, self._tier, blocks
            )
            if not self._ended.wait(WAIT_S):
                raise TimeoutError("a write does not end")

    def close(self) -> None:
        """End the tier and the loop."""
        if not self.copies.close(WAIT_S):
            raise TimeoutError("a copy does not end")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _next_key(self) -> TierKey:
        self._number += 1
        return 0, self._number.to_bytes(32, "big")

    def _written(self, copy_id: int, stored: tuple[TierKey, ...], *rest: object) -> None:
        self.num_bytes += len(stored) * self._block_bytes
        self._ended.set()


def measure(folder: Path, rounds: int, seconds: float, checkpoint: Path = CHECKPOINT) -> bool:
    """Print step times while each tier writes, beside steps alone; whether the target is met."""
    make_checkpoint(checkpoint)
    bounds = Bounds(checkpoint, num_blocks=NUM_BLOCKS, max_sequences=BATCH)
    engine = Ours("native", bounds)
    region = engine.region
    assert isinstance(region, PoolRegion)
    (prompt,) = prompts(1, PROMPT_TOKENS, seed=2)
    engine.prefill(prompt)
    begin_s = time.perf_counter()
    engine.prefill(prompts(1, PROMPT_TOKENS, seed=3)[0])
    prompt_s = time.perf_counter() - begin_s
    made_bytes = PROMPT_TOKENS * engine.prompt_token_bytes / prompt_s * WRITE_EVERY_S
    num_blocks = max(1, round(made_bytes / region.block_bytes))
    engine.fill(prompts(BATCH, CONTEXT, seed=1), temperature=0.0)
    engine.decode(8)
    reached = True
    for kind in ("host", "disk"):
        for times in (1, 10):
            with tempfile.TemporaryDirectory(dir=folder, prefix="steps-") as place:
                name = "host" if kind == "host" else f"disk:{place}"
                writer = Writer(name, region, min(times * num_blocks, region.num_blocks))
                try:
                    reached &= _beside(kind, times, engine, writer, rounds, seconds)
                finally:
                    writer.close()
    return reached


def _beside(
    kind: str, times: int, engine: Ours, writer: Writer, rounds: int, seconds: float
) -> bool:
    found: dict[str, list[float]] = {"idle": [], "writes": []}
    writing_s = 0.0
    for number in range(rounds + 1):
        for case, samples in found.items():
            stop = threading.Event()
            thread = threading.Thread(target=writer.run, args=(stop,), name="writes")
            if case == "writes":
                thread.start()
            begin_s = time.monotonic()
            steps = []
            while time.monotonic() < begin_s + seconds:
                step_s = time.perf_counter()
                engine.decode(1)
                steps.append(time.perf_counter() - step_s)
            if case == "writes":
                stop.set()
                thread.join(WAIT_S)
                writing_s += time.monotonic() - begin_s
            if number:  # the first round warms up
                samples.append(statistics.median(steps) * MS)
    rate = writer.num_bytes / MIB / writing_s
    much = "what prompts make" if times == 1 else f"{times} times what prompts make"
    return figure(
        f"tiers/step while {kind} writes {much}",
        found["writes"],
        found["idle"],
        unit="ms",
        target=round(TARGET, 3) if times == 1 else None,
        peer_name="the same steps, nothing written",
        note="native engine, Gemma 3 of 63 M parameters, float32, 1 thread, "
        f"{BATCH} sequences decode; {rate:.0f} MiB/s written; medians of {seconds:g} s",
    )
