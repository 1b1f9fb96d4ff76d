"""The engine that computes a worker's steps: its protocol; the folder's README has the rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from disagg.errors import DisaggError
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.forms import GroupForm
from disagg.scheduling.step import Step, StepResult
from disagg.workers.options import WorkerOptions
from disagg.workers.pool_region import PoolRegion, RankedPool


class EngineFailedError(DisaggError):
    """An engine can compute no step any more: the worker fails, and its process ends."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What an engine needs for speculative decoding; by default nothing: it computes no drafts.

    The drafts come with the step (`disagg.scheduling.drafts`).

    Attributes:
        num_tokens: drafts that it computes per slice at most; each sequence has so many slots
            behind its own tokens.
        eagle_groups: groups of the layout whose layers draft: a hit of theirs lacks the KV of its
            last token, so it is proven one block further. No engine here has such layers.
    """

    num_tokens: int = 0
    eagle_groups: frozenset[int] = frozenset()


class RunsSteps(Protocol):
    """Computes steps, one at a time and in the order of their launch."""

    def prepare(self, step: Step) -> None:
        """Make the step's table changes, and all else that can be made before it is computed.

        Called in the order of launch and before the step is run, on one thread, while another one
        runs earlier steps. What goes wrong with the step is the error of its result.

        Raises:
            EngineFailedError: no later step can be computed either.
        """
        ...

    def run(self, step: Step) -> StepResult:
        """Compute a step and sample; blocks until it is done.

        A step that was not prepared is prepared first; none may wait that was prepared before it.

        In the place of a `PLACEHOLDER` stands the token that it sampled last for the sequence. Of a
        sequence of a step that failed it computes nothing until that ends or begins anew.

        Writes the KV of the slices' tokens into their blocks and nothing else. Whatever goes wrong
        with a step is the result's ``error``.

        Raises:
            EngineFailedError: no later step can be computed either.
        """
        ...


class Engine(RunsSteps, Protocol):
    """One model on its device. What it declares stays as it is while the process lives."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of the model: workers exchange KV only if theirs are equal."""
        ...

    @property
    def dtype(self) -> str:
        """Type of weights and KV, such as ``bfloat16``. Part of the contract between workers."""
        ...

    @property
    def summary(self) -> str:
        """What it took of its machine, and why, in one line for people."""
        ...

    @property
    def layout(self) -> KVCacheLayout:
        """KV cache groups, and how large a block is. Part of the contract between workers."""
        ...

    @property
    def page_format(self) -> str:
        """How KV lie inside a page, which ``layout`` leaves open. Part of the contract too."""
        ...

    @property
    def forms(self) -> tuple[GroupForm, ...]:
        """Where each group's KV lies in a rank's blocks, for workers with other blocks or ranks.

        Part of the contract too; none where only equal workers can read it.
        """
        ...

    @property
    def region(self) -> PoolRegion | RankedPool:
        """The KV memory, with blocks of ``layout.block_bytes``; block 0 is the null block.

        Of a tensor-parallel engine each rank has a region, and that layout is a rank's.
        """
        ...

    @property
    def drafts(self) -> Drafts:
        """What its speculative decoding needs of tables and prefix cache."""
        ...

    @property
    def max_model_tokens(self) -> int:
        """Bound on prompt plus generated tokens."""
        ...


EngineFactory = Callable[[WorkerOptions], Engine]
"""Loads the model and allocates the pool; raises ConfigError where it cannot."""
