"""How long steps take: an engine under the production core, without router and transfers."""

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.commands.rounds import Say, rounds
from disagg.commands.varied_lengths import varied_length
from disagg.errors import ConfigError
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel
from disagg.messages.step_times import NUM_FEATURES, PAIRS, StepShape
from disagg.messages.submit import Role, Submit
from disagg.routing.estimates.least_squares import solve
from disagg.routing.estimates.place import StepCost
from disagg.scheduling.admission import served_tokens_max
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.step_meter import shape_of
from disagg.simulation.curves import Surface
from disagg.workers.engines.protocol import Engine

FIRST_TOKEN, NUM_TOKENS = 10, 250
"""Ids of the prompts' tokens, which every vocabulary has; what they say makes no step shorter."""
CHUNKS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BEFORE = (0, 1024, 4096, 8192, 16_384, 32_768, 65_536)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_BEFORE = (64, 1024, 4096, 16_384)
FILL_TOKENS_MAX = 16_384
"""Of prompts that are computed before decode steps of one length are measured: larger batches of
longer contexts are derived, see `decode_surface`."""
STEPS_MAX_IN_PROMPT = 10_000
STEPS_PER_FILL = 3
"""Of a batch, in each of the repeats."""

_Timed = dict[tuple[int, int], list[float]]
"""Milliseconds by row and column of a surface."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was timed."""

    shape: StepShape
    ms: float


@dataclass(slots=True)
class StepRig:
    """Computes steps of chosen shapes, and times them.

    Args:
        engine: a whole one, with its pool.
        limits: of the worker that it stands for.
        repeats: of every shape, all shapes one after the other in each, so that what disturbs the
            machine for a while spoils no shape alone; the median counts.
    """

    engine: Engine
    limits: WorkerLimits
    repeats: int
    say: Say
    samples: list[Sample] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """By what was measured: each sample as a share of what its surface says there."""
    _core: WorkerCore = field(init=False)
    _random: random.Random = field(init=False)
    _num_made: int = 0

    def __post_init__(self) -> None:
        layout = self.engine.layout
        kv = KVCacheCoordinator(
            layout,
            self.engine.region.num_blocks,
            max_model_tokens=self.limits.max_model_tokens,
            max_step_tokens=self.limits.steps_max * self.limits.max_step_tokens,
            steps_max=self.limits.steps_max,
            policy=CachePolicy(),
        )
        hasher = BlockHasher(b"calibration", layout.hash_block_tokens)
        self._core = WorkerCore(
            Incarnation("calibration", "1"), layout, kv, hasher, self.limits, lambda _: 1
        )
        self._random = random.Random(0)

    @property
    def _context_max(self) -> int:
        """The longest prompt here, with an answer behind it."""
        kv = self._core.kv
        by_pool = kv.num_usable_blocks * min(group.spec.block_tokens for group in kv.layout.groups)
        return min(self.limits.max_model_tokens, by_pool // len(kv.layout.groups)) - 64

    @property
    def served_tokens(self) -> int:
        """Of prompt plus answer, as a worker says it when it registers."""
        return served_tokens_max(self.limits, self._core.kv)

    # --- what is measured

    def warm_up(self) -> None:
        """Let every size of step be computed once: engines compile and allocate in the first.

        Raises:
            ConfigError: the settings, or the pool, allow no such steps.
        """
        self._check_limits()
        for num_tokens in (self.limits.max_step_tokens, 64, 1):
            self._prompt_ms(self._prompt(num_tokens))
        keys = self._filled([self._prompt(64) for _ in range(min(4, self.limits.max_sequences))])
        self._decodes(len(keys), 2)
        self._end(keys)
        self.samples.clear()

    def prefill_surface(self) -> Surface:
        """Chunks of prompts by their tokens and those before them, which come from the cache."""
        chunks = [one for one in CHUNKS if one < self.limits.max_step_tokens]
        chunks.append(self.limits.max_step_tokens)
        before = [one for one in BEFORE if one + chunks[-1] <= self._context_max]
        if not before:
            raise ConfigError(
                f"a pool of {self._core.kv.num_usable_blocks} blocks and "
                f"{self.limits.max_model_tokens} tokens hold no step of {chunks[-1]} tokens",
                param="worker.num_blocks",
            )
        prefixes = [self._prompt(num_before) for num_before in before]
        took: _Timed = defaultdict(list)
        what = f"prefill of {chunks[0]} to {chunks[-1]:,} tokens"
        for number in rounds(what, self.repeats, self.say):
            for column, prefix in enumerate(prefixes):
                if prefix:
                    self._prompt_ms(prefix)
                for row, num_tokens in enumerate(chunks):
                    if num_tokens < chunks[-1]:  # chunks of as much as a step holds are frequent
                        num_tokens = varied_length(num_tokens, number, self.repeats)
                    prompt = [*prefix, *self._prompt(num_tokens)]
                    took[row, column].append(self._prompt_ms(prompt))
        return self._surface("prefill", chunks, before, took)

    def decode_surface(self) -> tuple[Surface, int]:
        """Decode steps by sequences and the tokens before each; and how many points are derived.

        Where filling a batch would take more than `FILL_TOKENS_MAX` tokens, or more than the pool
        has, it is derived: what the context of one sequence adds to a step, times the sequences.
        """
        most = self.limits.max_sequences
        batches = [one for one in BATCHES if one < most] + [most]
        before = [one for one in DECODE_BEFORE if one < self._context_max]
        largest = [
            most if not column else min(FILL_TOKENS_MAX // one, self._num_that_fit(one, most))
            for column, one in enumerate(before)
        ]
        measured = [[one for one in batches if one <= max(1, num)] for num in largest]
        prompts = [
            [self._prompt(num_before) for _ in range(nums[-1])]
            for num_before, nums in zip(before, measured, strict=True)
        ]
        took: _Timed = defaultdict(list)
        for _ in rounds(f"decode of 1 to {most} sequences", self.repeats, self.say):
            for column, nums in enumerate(measured):
                self.say(f"{nums[0]} to {nums[-1]} of them after {before[column]:,} tokens each")
                keys = self._filled(prompts[column])
                for row in reversed(range(len(nums))):
                    self._end(keys[nums[row] :])
                    del keys[nums[row] :]
                    took[row, column] += self._decodes(len(keys), STEPS_PER_FILL)
                self._end(keys)
        num_derived = 0
        middle = {point: statistics.median(same) for point, same in took.items()}
        for column, nums in enumerate(measured):
            last = len(nums) - 1
            slope = max(0.0, middle[last, column] - middle[last, 0]) / nums[-1]
            for row in range(len(nums), len(batches)):
                took[row, column] = [middle[row, 0] + batches[row] * slope]
                num_derived += 1
        return self._surface("decode", batches, before, took), num_derived

    def mixed_samples(self) -> list[Sample]:
        """Steps that decode and compute a chunk of a prompt."""
        most, most_sequences = self.limits.max_step_tokens, self.limits.max_sequences
        shapes = [
            (num, num_tokens)
            for num in sorted({1, min(4, most_sequences - 1), most_sequences // 2})
            for num_tokens in sorted({min(64, most - num), most - num})
            if num >= 1 and num_tokens >= 2
        ]
        took: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for _ in rounds("decodes beside tokens of a prompt", self.repeats, self.say):
            for num, num_tokens in shapes:
                keys = self._filled([self._prompt(64) for _ in range(num)])
                key = self._submit(self._prompt(num_tokens))
                took[num, num_tokens].append(self._step())
                self._end([*keys, key])
        return [sorted(same, key=lambda one: one.ms)[len(same) // 2] for same in took.values()]

    # --- inside

    def _surface(
        self, name: str, across: Sequence[int], along: Sequence[int], took: _Timed
    ) -> Surface:
        surface = _surface(across, along, took)
        self.ratios[name] = [
            ms / surface.ms[row][column] for (row, column), same in took.items() for ms in same
        ]
        return surface

    def _check_limits(self) -> None:
        most, sequences = self.limits.max_step_tokens, self.limits.max_sequences
        if most < sequences:
            raise ConfigError(
                f"{sequences} sequences (scheduling.max_sequences) do not decode in one step of "
                f"{most} tokens (scheduling.max_step_tokens), so it cannot be measured: set fewer",
                param="scheduling.max_sequences",
            )
        if most >= self.limits.max_model_tokens:
            raise ConfigError(
                f"no prompt of {self.limits.max_model_tokens:,} tokens at most fills a step of "
                f"{most} (scheduling.max_step_tokens): set less",
                param="scheduling.max_step_tokens",
            )

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, NUM_TOKENS) for _ in range(num_tokens)]

    def _submit(self, prompt: Sequence[int], max_tokens: int = 1) -> RequestKey:
        self._num_made += 1
        key = RequestKey(str(self._num_made), 1)
        submit = Submit(key, Role.LOCAL, tuple(prompt), (), b"", SamplingParams(max_tokens))
        if self._core.on_router_message(0, submit):
            raise self._too_small(1, len(prompt))
        return key

    def _num_that_fit(self, num_tokens: int, most: int) -> int:
        """Sequences with prompts of so many tokens that the pool holds until all of them decode."""
        kv = self._core.kv
        grown = num_tokens + FILL_TOKENS_MAX // self.limits.max_step_tokens + 64
        keys = [("fits", number) for number in range(most)]
        num_fitting = sum(kv.admit(key, min(grown, self.limits.max_model_tokens)) for key in keys)
        for key in keys:
            kv.unpromise(key)
        return num_fitting

    def _end(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self._core.on_router_message(0, Cancel(key, "measured"))

    def _step(self) -> Sample:
        step, _ = self._core.next_step(0)
        if step is None:
            raise ConfigError(
                f"the pool of {self._core.kv.num_usable_blocks} blocks is too small for this",
                param="worker.num_blocks",
            )
        self.engine.prepare(step)
        began_s = time.perf_counter()
        result = self.engine.run(step)
        took_ms = (time.perf_counter() - began_s) * 1000
        if result.error:
            raise ConfigError(f"the engine failed: {result.error}", param="worker.engine")
        self._core.on_step_done(0, result)
        sample = Sample(shape_of(step.slices), took_ms)
        self.samples.append(sample)
        return sample

    def _prompt_ms(self, prompt: Sequence[int]) -> float:
        """Compute a prompt as far as it is not cached; the time of all its steps."""
        key = self._submit(prompt)
        took_ms = 0.0
        for _ in range(STEPS_MAX_IN_PROMPT):
            if key not in self._core.sequences:
                return took_ms
            took_ms += self._step().ms
        raise AssertionError(f"{len(prompt)} tokens take more than {STEPS_MAX_IN_PROMPT} steps")

    def _filled(self, prompts: Sequence[Sequence[int]]) -> list[RequestKey]:
        """Sequences that decode, after their prompts."""
        most = served_tokens_max(self.limits, self._core.kv)
        keys = [self._submit(prompt, max(1, most - len(prompt) - 1)) for prompt in prompts]
        for _ in range(STEPS_MAX_IN_PROMPT):
            running = [self._core.sequences[key] for key in keys if key in self._core.sequences]
            if len(running) < len(keys):  # the first ones ended before the last one had room
                raise self._too_small(len(keys), len(prompts[0]))
            if all(one.num_computed >= one.num_prompt_tokens for one in running):
                return keys
            self._step()
        raise AssertionError("prompts that are not computed")

    def _decodes(self, num: int, num_steps: int) -> list[float]:
        """What steps of all running sequences take, after a first one."""
        self._step()
        took = [self._step() for _ in range(num_steps)]
        if any(one.shape.num_decodes != num for one in took):
            raise self._too_small(num, 64)
        return [one.ms for one in took]

    def _too_small(self, num: int, num_tokens: int) -> ConfigError:
        return ConfigError(
            f"{num} sequences of {num_tokens} tokens and their answers do not fit the pool of "
            f"{self._core.kv.num_usable_blocks} blocks (worker.num_blocks), or steps of "
            f"{self.limits.max_step_tokens} tokens (scheduling.max_step_tokens) are too short",
            param="worker.num_blocks",
        )


def _surface(across: Sequence[int], along: Sequence[int], took: _Timed) -> Surface:
    """Medians, none of them above that of a step that computes as much and more.

    Whatever disturbs a machine adds time, so a point above a larger one was disturbed.
    """
    rows = [
        [statistics.median(took[row, column]) for column in range(len(along))]
        for row in range(len(across))
    ]
    for row in reversed(range(len(across))):
        for column in reversed(range(len(along))):
            larger = rows[row + 1][column] if row + 1 < len(across) else math.inf
            longer = rows[row][column + 1] if column + 1 < len(along) else math.inf
            rows[row][column] = min(rows[row][column], larger, longer)
    return Surface(tuple(map(float, across)), tuple(map(float, along)), tuple(map(tuple, rows)))


def linear_fit(samples: Sequence[Sample]) -> StepCost:
    """The router's own form of what steps take, fitted to the same steps."""
    products, timed = [0.0] * len(PAIRS), [0.0] * NUM_FEATURES
    for one in samples:
        features = one.shape.features
        for number, (left, right) in enumerate(PAIRS):
            products[number] += features[left] * features[right]
        for number, feature in enumerate(features):
            timed[number] += feature * one.ms
    found = solve(NUM_FEATURES, products, timed)
    return StepCost(*(one or 0.0 for one in found))
