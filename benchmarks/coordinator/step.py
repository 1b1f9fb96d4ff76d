"""The whole bookkeeping of a decode step: what the control thread does beside the engine.

The production ``WorkerCore`` with everything below it: the choice of the batch, slots, tables for
the engine, holds, publication, new tokens and their hashes, the outputs for the router. The engine
is left out: its samples are there at once.
"""

import gc
import time

from benchmarks.coordinator.cases import BLOCK, coordinator
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.step import Step, StepResult

WINDOWS = [0, 1024]
"""One group of full attention, one window."""
CASES = ((256, 1_200), (256, 8_192), (32, 131_072))
"""Sequences that decode together, and tokens of each prompt."""
QUICK_CASES = ((256, 1_200),)
STEP_TOKENS = 8_192
SAMPLED = SampledToken(1)


class DecodeSteps:
    """A worker's core in which sequences of nearly one length decode, at every offset in a block.

    They go on for ``num_samples`` calls of ``sample``.
    """

    def __init__(self, num_sequences: int, num_tokens: int, num_samples: int) -> None:
        self._num_sequences = num_sequences
        # A prompt's own steps, those of the others' prompts after it, and the samples.
        num_steps = num_sequences * (num_tokens // STEP_TOKENS + 2) + (num_samples + 1) * BLOCK
        longest = num_tokens + BLOCK + num_steps
        num_blocks = num_sequences * (longest // BLOCK + 1024 // BLOCK + STEP_TOKENS // BLOCK)
        kv = coordinator(WINDOWS, num_blocks, longest + 1)
        limits = WorkerLimits(
            max_model_tokens=longest + 1,
            max_step_tokens=STEP_TOKENS,
            max_sequences=num_sequences,
            max_waiting=num_sequences,
            handover_share_max=1.0,
            reserve_timeout_ms=1_000,
            reserve_passes_max=1,
            reservation_ttl_ms=1_000,
            lease_ttl_ms=1_000,
            committed_max=1,
            commit_repeat_ms=1_000,
            read_stuck_ms=1_000,
            blocks_per_read_max=1,
            quarantine_share_max=1.0,
        )
        layout = kv.layout
        hasher = BlockHasher(b"benchmark", layout.hash_block_tokens)
        self._core = WorkerCore(
            Incarnation("w", "1"), layout, kv, hasher, limits, lambda delay_ms: delay_ms
        )
        words = list(range(50_000)) * (longest // 50_000 + 2)  # shared: ints weigh more than lists
        for number in range(num_sequences):
            length = num_tokens + number % BLOCK
            submit = Submit(
                RequestKey(str(number), 1),
                Role.LOCAL,
                tuple(words[number * 131 : number * 131 + length]),
                (),
                b"",
                SamplingParams(max_tokens=num_steps),
            )
            self._core.on_router_message(0, submit)
        while not self._decodes(step := self._begin()):
            self._end(step)
        self._end(step)

    def sample(self) -> tuple[float, float]:
        """Steps in which every sequence ends a block once.

        Returns:
            CPU seconds of the thread per step: until the step is given to the engine, and from
            its result on.
        """
        before, after = 0.0, 0.0
        for _ in range(BLOCK):
            start = time.thread_time()
            step = self._begin()
            begun = time.thread_time()
            result = _result(step)
            done = time.thread_time()
            self._core.on_step_done(0, result)
            before += begun - start
            after += time.thread_time() - done
            if len(step.slices) != self._num_sequences:
                raise AssertionError(
                    f"{len(step.slices)} of {self._num_sequences} sequences decode"
                )
        return before / BLOCK, after / BLOCK

    def _begin(self) -> Step:
        step, _ = self._core.next_step(0)
        if step is None:
            raise AssertionError("nothing to compute")
        return step

    def _end(self, step: Step) -> None:
        self._core.on_step_done(0, _result(step))

    def _decodes(self, step: Step) -> bool:
        """Whether every sequence decodes: no prefill is left."""
        return all(len(part.token_ids) == 1 for part in step.slices) and not (
            self._core.batcher.waiting
        )


def _result(step: Step) -> StepResult:
    """A result as an engine gives it: a token for every sequence that is to be sampled."""
    return StepResult(
        step.step_id, tuple(SAMPLED if part.sampling else None for part in step.slices)
    )


def measure_steps(
    num_sequences: int, num_tokens: int, num_samples: int
) -> list[tuple[float, float]]:
    """Milliseconds of CPU per step, until its launch and from its result on; a pair per sample."""
    steps = DecodeSteps(num_sequences, num_tokens, num_samples + 1)
    gc.collect()
    gc.disable()  # as in the other cases: no sample pays for a collection
    try:
        steps.sample()
        pairs = [steps.sample() for _ in range(num_samples)]
    finally:
        gc.enable()
    return [(before * 1e3, after * 1e3) for before, after in pairs]
