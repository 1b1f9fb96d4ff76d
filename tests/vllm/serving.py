"""Requests over an engine, driven by the production scheduler; what the engine was told, too."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.step import Step
from disagg.workers.engines.protocol import Engine


@dataclass
class Serving:
    """One worker's scheduler over an engine, with a pool that may be smaller than the engine's.

    Attributes:
        launched: steps that are in flight, at most ``steps_max``.
        steps: all that were launched.
        samples: of each request, in order.
    """

    engine: Engine
    max_step_tokens: int = 512
    num_blocks: int = 0
    """0: the engine's."""
    max_model_tokens: int = 1000
    steps_max: int = 1
    launched: deque[Step] = field(default_factory=deque)
    steps: list[Step] = field(default_factory=list)
    samples: dict[str, list[SampledToken]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = self.engine.layout
        limits = WorkerLimits(
            max_model_tokens=self.max_model_tokens,
            max_step_tokens=self.max_step_tokens,
            max_sequences=8,
            max_waiting=32,
            handover_share_max=1.0,
            reserve_timeout_ms=100,
            reserve_passes_max=3,
            reservation_ttl_ms=5_000,
            lease_ttl_ms=5_000,
            committed_max=2,
            commit_repeat_ms=50,
            read_stuck_ms=1_000,
            steps_max=self.steps_max,
            blocks_per_read_max=4,
            quarantine_share_max=1.0,
        )
        kv = KVCacheCoordinator(
            layout,
            self.num_blocks or self.engine.region.num_blocks,
            max_model_tokens=limits.max_model_tokens,
            max_step_tokens=self.steps_max * self.max_step_tokens,
            steps_max=self.steps_max,
        )
        hasher = BlockHasher(b"key", layout.hash_block_tokens)
        self.core = WorkerCore(Incarnation("w", "e"), layout, kv, hasher, limits, lambda _: 1)

    def submit(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams, generation: int = 1
    ) -> RequestKey:
        key = RequestKey(name, generation)
        self.samples[name] = []
        self.core.on_router_message(0, Submit(key, Role.LOCAL, tuple(prompt), (), b"", sampling))
        return key

    def step(self) -> str:
        """Launch what may be and run the oldest step; returns its error."""
        while (planned := self.core.next_step(0)[0]) is not None:
            self.engine.prepare(planned)
            self.launched.append(planned)
            self.steps.append(planned)
        step = self.launched.popleft()
        result = self.engine.run(step)
        emitted = {
            output.key
            for action in self.core.on_step_done(0, result)
            if isinstance(action, ToRouter) and isinstance(action.message, StepOutputs)
            for output in action.message.outputs
        }
        for part, sample in zip(step.slices, result.samples, strict=not result.error):
            if sample is not None and part.key in emitted:
                self.samples[part.key.request_id].append(sample)
        return result.error

    def run(self) -> None:
        """Until nobody is left; no step may fail."""
        while self.core.sequences or self.launched:
            assert self.step() == ""

    def tokens(self, name: str) -> list[int]:
        return [sample.token_id for sample in self.samples[name]]

    def logprobs(self, name: str) -> list[float]:
        found = [sample.logprobs for sample in self.samples[name]]
        return [one.logprob for one in found if one is not None]

    def first_starts(self, names: Sequence[str]) -> list[int]:
        """Where each request's first slice began: what its prefix hit left to compute."""
        starts: dict[str, int] = {}
        for step in self.steps:
            for part in step.slices:
                starts.setdefault(part.key.request_id, part.start)
        return [starts[name] for name in names]
