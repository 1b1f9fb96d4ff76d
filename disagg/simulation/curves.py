"""What a step, a READ and a message take on some machine: measured points, and lines between."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from disagg.errors import ConfigError
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.step_times import SCALE_TOKENS, StepShape
from disagg.routing.estimates.place import LinkCost


@dataclass(frozen=True, slots=True)
class Surface:
    """Milliseconds over two axes: linear between the points of a grid.

    Beyond its largest points it goes on as between the last two, below its smallest ones it is
    flat. Never less than 0.

    Attributes:
        across: ascending points of the first axis.
        along: of the second one.
        ms: a row for each of the first axis, with a figure for each of the second.
    """

    across: tuple[float, ...]
    along: tuple[float, ...]
    ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("across", self.across), ("along", self.along)):
            if not axis or any(a >= b for a, b in itertools.pairwise(axis)):
                raise ConfigError(f"{name}: points must ascend, these are {axis}", param=name)
        if len(self.ms) != len(self.across) or any(len(row) != len(self.along) for row in self.ms):
            raise ConfigError(
                f"ms: a grid of {len(self.across)} x {len(self.along)} is wanted", param="ms"
            )

    def at(self, across: float, along: float) -> float:
        """The time at a point."""
        low, share = _between(self.across, across)
        first = _on_row(self.along, self.ms[low], along)
        if not share:
            return max(0.0, first)
        second = _on_row(self.along, self.ms[low + 1], along)
        return max(0.0, first + share * (second - first))


@dataclass(frozen=True, slots=True)
class Line:
    """Milliseconds, or a share of them, over one axis, as a `Surface` has them over two."""

    along: tuple[float, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        Surface((0.0,), self.along, (self.ms,))  # refuses what is none

    def at(self, point: float) -> float:
        """What is there."""
        return max(0.0, _on_row(self.along, self.ms, point))


NOTHING = Line((0.0,), (0.0,))


def _on_row(axis: Sequence[float], row: Sequence[float], point: float) -> float:
    low, share = _between(axis, point)
    return row[low] + share * (row[low + 1] - row[low]) if share else row[low]


def _between(axis: Sequence[float], point: float) -> tuple[int, float]:
    """The point before, and how far it is from there to the next one; beyond the last: over 1."""
    if len(axis) == 1 or point <= axis[0]:
        return 0, 0.0
    low = min(bisect_right(axis, point), len(axis) - 1) - 1
    return low, (point - axis[low]) / (axis[low + 1] - axis[low])


@dataclass(frozen=True, slots=True)
class Curves:
    """A worker as `disagg calibrate` measured it, and the links between two of them.

    Attributes:
        prefill: a step of tokens of prompts, by how many and by how many stand before them.
        decode: a step of sequences that get their next token, by how many and by how many tokens
            each has before it.
        shared_ms: what a step of both takes less than two steps.
        link: a READ between two workers.
        hop_ms: a message between router and worker, or two workers.
        request: the way of a request to the plan and of its first token to the client, beside
            those messages, by tokens of the prompt: HTTP, JSON, names of blocks.
        request_beside_ms: how much longer that way is while the workers of a host compute.
        step_more_ms: what a step takes in a worker that serves, beside what the engine alone takes.
        sequence_more_ms: likewise for each sequence that gets a token: its way through the worker.
        read_more_ms: what a READ takes in workers that serve, beside what ``link`` says.
        beside: by how much a step is longer while all other workers of its host compute, as a
            share of it, by the step's tokens: those that decode and those of prompts.
        workers_per_host: workers that share a host's cores, by their numbers.
        layout: groups, and bytes of a block.
        num_blocks: of the pool, the null block included.
        max_model_tokens: prompt plus answer.
        name: of model and machine, for people.
    """

    prefill: Surface
    decode: Surface
    shared_ms: float
    link: LinkCost
    hop_ms: float
    request: Line
    layout: KVCacheLayout = field(repr=False)
    num_blocks: int
    max_model_tokens: int
    name: str = ""
    request_beside_ms: float = 0.0
    step_more_ms: float = 0.0
    sequence_more_ms: float = 0.0
    read_more_ms: float = 0.0
    beside: Line = NOTHING
    workers_per_host: int = 1

    def step_ms(self, shape: StepShape) -> float:
        """What a step takes by what it computes; at least a microsecond, so that time goes on."""
        prefill = decode = 0.0
        if tokens := shape.num_prefill_tokens:
            before = shape.prefill_context * SCALE_TOKENS / tokens - (tokens - 1) / 2
            prefill = self.prefill.at(tokens, before)
        num = shape.num_decodes
        if num:
            decode = self.decode.at(num, shape.decode_context * SCALE_TOKENS / num)
        engine = prefill + decode
        if prefill and decode:
            engine = max(prefill, decode, engine - self.shared_ms)
        return max(engine + self.step_more_ms + num * self.sequence_more_ms, 1e-3)

    def with_mixed(self, mixed: Sequence[tuple[StepShape, float]]) -> "Curves":
        """The same with ``shared_ms`` as steps of both, and the ms that they took, have it."""
        alone = replace(self, shared_ms=0.0)
        saved = [alone.step_ms(shape) - took_ms for shape, took_ms in mixed]
        return replace(self, shared_ms=max(0.0, median(saved)) if saved else 0.0)

    def prompt_ms(self, num_tokens: int, step_tokens: int) -> float:
        """What a prompt takes on an idle worker, in chunks of at most ``step_tokens``."""
        return sum(
            self.prefill.at(min(step_tokens, num_tokens - start), start)
            for start in range(0, num_tokens, step_tokens)
        )
