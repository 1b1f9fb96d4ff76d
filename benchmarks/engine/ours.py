"""Our engines under the production core: what a worker's control thread does, without its shell."""

from collections.abc import Sequence

from benchmarks.engine.subject import Bounds, Tokens
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel
from disagg.messages.submit import Role, Submit
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.workers.engines.choice import build_engine
from disagg.workers.options import WorkerOptions
from disagg.workers.pool_region import PoolRegion, RankedPool


class Ours:
    """The native engine or vLLM's runner, with our scheduler, coordinator and sampler."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self._engine = build_engine(_options(name, bounds))
        self._max_model_tokens = bounds.max_model_tokens
        layout = self._engine.layout
        kv = KVCacheCoordinator(
            layout,
            self._engine.region.num_blocks,
            max_model_tokens=bounds.max_model_tokens,
            max_step_tokens=bounds.max_step_tokens,
        )
        self._core = WorkerCore(
            Incarnation("w", "1"),
            layout,
            kv,
            BlockHasher(b"benchmark", layout.hash_block_tokens),
            _limits(bounds),
            lambda _: 1,
        )
        self._num_made = 0
        self._answers: dict[RequestKey, list[int]] = {}

    @property
    def region(self) -> PoolRegion | RankedPool:
        """The engine's pool."""
        return self._engine.region

    @property
    def prompt_token_bytes(self) -> float:
        """Of whole blocks, per token of a prompt, over all groups."""
        layout = self._engine.layout
        return sum(layout.block_bytes / group.spec.block_tokens for group in layout.groups)

    def prefill(self, prompt: Tokens) -> int:
        """See `Subject`."""
        key = self._submit(prompt, SamplingParams(max_tokens=1))
        while not self._answers[key]:
            self._step()
        return self._answers.pop(key)[0]

    def fill(self, prompts: Sequence[Tokens], temperature: float) -> None:
        """See `Subject`."""
        for number, prompt in enumerate(prompts[len(self._answers) :]):
            room = self._max_model_tokens - len(prompt)
            top_p = 0.95 if temperature else 1.0
            self._submit(prompt, SamplingParams(room, temperature, top_p, seed=number))
        while not all(self._answers.values()):
            self._step()

    def decode(self, num_steps: int) -> None:
        """See `Subject`."""
        for _ in range(num_steps):
            num_tokens = self._step()
            if num_tokens != len(self._answers):
                raise AssertionError(f"{num_tokens} tokens for {len(self._answers)} sequences")

    def clear(self) -> list[list[int]]:
        """See `Subject`."""
        answers, self._answers = self._answers, {}
        for key in answers:
            self._core.on_router_message(0, Cancel(key, "measured"))
        return list(answers.values())

    def _submit(self, prompt: Tokens, sampling: SamplingParams) -> RequestKey:
        self._num_made += 1
        key = RequestKey(str(self._num_made), 1)
        self._answers[key] = []
        submit = Submit(key, Role.LOCAL, tuple(prompt), (), b"", sampling)
        if refused := self._core.on_router_message(0, submit):
            raise AssertionError(str(refused))
        return key

    def _step(self) -> int:
        """Plan, compute and conclude a step; returns how many tokens it emitted."""
        step, _ = self._core.next_step(0)
        if step is None:
            raise AssertionError("nothing to compute")
        result = self._engine.run(step)
        if result.error:
            raise AssertionError(result.error)
        num_tokens = 0
        for action in self._core.on_step_done(0, result):
            if isinstance(action, ToRouter) and isinstance(action.message, StepOutputs):
                for output in action.message.outputs:
                    self._answers[output.key] += output.token_ids
                    num_tokens += len(output.token_ids)
        return num_tokens


def _options(name: str, bounds: Bounds) -> WorkerOptions:
    return WorkerOptions(
        worker_id="benchmark",
        role="both",
        model_dir=str(bounds.checkpoint),
        model_name="model",
        router_addresses=(),
        engine="vllm" if name == "vllm" else "native",
        device="cpu",
        dtype="float32",
        num_threads=bounds.num_threads,
        num_blocks=bounds.num_blocks,
        block_tokens=bounds.block_tokens,
        max_model_tokens=bounds.max_model_tokens,
        max_step_tokens=bounds.max_step_tokens,
        max_sequences=bounds.max_sequences,
    )


def _limits(bounds: Bounds) -> WorkerLimits:
    return WorkerLimits(
        max_model_tokens=bounds.max_model_tokens,
        max_step_tokens=bounds.max_step_tokens,
        max_sequences=bounds.max_sequences,
        max_waiting=bounds.max_sequences,
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
