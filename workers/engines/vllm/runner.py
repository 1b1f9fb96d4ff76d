"""vLLM's first model runner (V1), on the CPU and on CUDA: what we reach into.

On CUDA vLLM would take its second one (V2); `devices.environment` asks for the first, and says why.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disagg.errors import ConfigError
from disagg.grammar.compiler import GrammarCompiler
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.scheduling.engine_steps import Failed, Scored
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.draw import some_rows
from disagg.workers.engines.finite import NonFiniteError, non_finite
from disagg.workers.engines.logprobs import prompt_logprobs
from disagg.workers.engines.sampler import Sampler
from disagg.workers.engines.vllm.block_changes import BlockChanges
from disagg.workers.engines.vllm.runner_batch import key_of

_FAILED = Failed("NonFiniteError: a hidden state or a logit is not finite")


class DrawsHere:
    """Stands in the place of vLLM's sampler: tokens are a function of seed and position."""

    def __init__(self, runner: Any, grammars: GrammarCompiler) -> None:
        self._runner = runner  # its batch is made anew when the KV cache is
        self.sampler = Sampler(grammars)
        self._slices: Mapping[str, SequenceSlice] = {}
        self._failed: set[str] = set()
        self.drawn: dict[str, SampledToken] = {}

    def expect(self, slices: Mapping[str, SequenceSlice]) -> None:
        """Take the slices of the step whose logits come next, by the runner's names."""
        self._slices, self._failed, self.drawn = slices, set(), {}

    def leave_out(self, names: set[str]) -> None:
        """Draw nothing for these, and add to them whose logits are not finite."""
        self._failed = names

    def __call__(self, logits: torch.Tensor, sampling_metadata: object) -> Any:
        """Token of each row of the runner's batch; 0 for those that sample nothing."""
        from vllm.v1.outputs import SamplerOutput

        names: Sequence[str] = self._runner.input_batch.req_ids
        sampled = [row for row, name in enumerate(names) if self._slices[name].sampling is not None]
        for number in non_finite(some_rows(logits, sampled), [1] * len(sampled)):
            self._failed.add(names[sampled[number]])
        rows = [row for row in sampled if names[row] not in self._failed]
        chosen = [self._slices[names[row]] for row in rows]
        tokens = torch.zeros((len(names), 1), dtype=torch.int32, device=logits.device)
        if rows:
            drawn = self.sampler.sample(some_rows(logits, rows), chosen)
            token_ids = [one.token_id for one in drawn]
            tokens[rows, 0] = torch.tensor(token_ids, dtype=torch.int32, device=logits.device)
            self.drawn = {names[row]: one for row, one in zip(rows, drawn, strict=True)}
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


class Runner:
    """vLLM's V1 model runner in the process of its rank, and the rank's KV memory.

    Args:
        worker: vLLM's, with its KV cache allocated.
        layers: names of those that keep something.
        num_blocks: of the pool.
        block_bytes: of a block in this rank.
        num_parts: of a block: one per layer of a group where layers lie apart.

    Attributes:
        pool: int8 [num_blocks, block_bytes], the runner's own storage. Where a block lies in
            several parts, [num_blocks, num_parts, part_bytes], with the parts far apart.
        page_format: what decides how a kernel lays KV out inside a page: backend, instruction
            set, type; and what K were rotated by, where that depends on more than the checkpoint.

    Raises:
        ConfigError: vLLM has allocated something else.
    """

    def __init__(
        self,
        worker: Any,
        layers: Sequence[str],
        num_blocks: int,
        block_bytes: int,
        num_parts: int,
    ) -> None:
        self._worker, self._runner = worker, worker.model_runner
        grammars = GrammarCompiler(worker.vllm_config.model_config.model)
        self._sampler = self._runner.sampler = DrawsHere(self._runner, grammars)
        context = worker.vllm_config.compilation_config.static_forward_context
        modules = [context[name] for name in layers]
        memory = _storage_of(modules[0])
        if memory.numel() != num_blocks * block_bytes:
            raise ConfigError(
                f"vLLM allocated {memory.numel()} bytes for {num_blocks} blocks of {block_bytes}",
                param="worker.engine",
            )
        self.pool = memory.view(num_blocks, block_bytes)
        if num_parts > 1:
            self.pool = memory.view(num_parts, num_blocks, -1).transpose(0, 1)
        self.pool[NULL_BLOCK] = -1  # NaN in every type: whoever reads through it fails its step
        form = worker.vllm_config.cache_config.kv_cache_layout
        self.page_format = f"{form}: {', '.join(sorted(set(map(_format_of, modules))))}"
        if num_parts > 1:
            self.page_format += f"; {num_parts} parts"
        model = self._runner.get_model()
        if any(getattr(module, "use_long_rope", False) for module in model.modules()):
            self.page_format += "; long RoPE"  # where sequences may be long, for short ones too

    def run(
        self, order: Any, slices: Mapping[str, SequenceSlice], changes: BlockChanges
    ) -> dict[str, SampledToken | Scored | Failed]:
        """Compute a step, draw its tokens and score its prompts, by name.

        Raises:
            NonFiniteError: no sequence's hidden states are finite.
        """
        if changes.zeroed:
            self.pool[torch.tensor(changes.zeroed, device=self.pool.device)] = 0
        if changes.copied:
            sources, targets = torch.tensor(changes.copied, device=self.pool.device).T
            self.pool[targets] = self.pool[sources]
        self._sampler.sampler.apply(map(key_of, order.finished_req_ids), slices.values())
        self._sampler.expect(slices)
        result = self._worker.execute_model(order)
        if result is not None:
            raise RuntimeError("vLLM's runner ended a step without logits")
        state = self._runner.execute_model_state
        num_tokens = order.total_num_scheduled_tokens
        names: Sequence[str] = self._runner.input_batch.req_ids  # in the order of the rows
        lengths = [len(slices[name].token_ids) for name in names]
        bad = {names[i] for i in non_finite(state.hidden_states[:num_tokens], lengths)}
        if len(bad) == len(names):
            self._runner.execute_model_state = None
            raise NonFiniteError("a hidden state is not finite")
        scored = self._score(state.hidden_states, slices, bad)
        self._sampler.leave_out(bad)
        self._worker.sample_tokens(None)
        drawn = self._sampler.drawn
        failed = dict.fromkeys(bad, _FAILED)
        with_scores = {name: Scored(drawn.get(name), found) for name, found in scored.items()}
        return {**drawn, **with_scores, **failed}

    def _score(
        self,
        hidden_states: torch.Tensor,
        slices: Mapping[str, SequenceSlice],
        bad: set[str],
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        """What the model thinks of prompts, by name; every rank has a part in all logits.

        Those for which it has a logit that is not finite are added to ``bad``.
        """
        row, found = 0, {}
        model = self._runner.get_model()
        vocab_size = self._worker.vllm_config.model_config.get_vocab_size()

        def logits_of(first: int, end: int) -> torch.Tensor:
            logits: torch.Tensor = model.compute_logits(hidden_states[first:end])
            return logits

        names: Sequence[str] = self._runner.input_batch.req_ids  # in the order of the rows
        for name in names:
            part = slices[name]
            if part.scored_token_ids and name not in bad:
                try:
                    found[name] = prompt_logprobs(part, row, vocab_size, logits_of)
                except NonFiniteError:
                    bad.add(name)
            row += len(part.token_ids)
        return found

    @property
    def num_requests(self) -> int:
        """Sequences that the runner knows of, running or not."""
        return len(self._runner.requests)

    @property
    def num_histories(self) -> int:
        """Sequences whose tokens are kept for what is sampled next."""
        sampler = self._sampler.sampler
        return len(sampler.histories) + len(sampler.grammars)

    @property
    def num_rows(self) -> int:
        """Sequences of the last step."""
        return int(self._runner.input_batch.num_reqs)


def _storage_of(module: Any) -> torch.Tensor:
    first = module.kv_cache
    while isinstance(first, (list, tuple)):
        first = first[0]
    return torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())


def _format_of(module: Any) -> str:
    parts = (
        module.get_attn_backend().get_name(),
        getattr(module, "isa", None),
        getattr(module, "kv_cache_dtype", None),
        *_state_format(module),
    )
    return " ".join(str(part) for part in parts if part is not None)


def _state_format(module: Any) -> list[str]:
    """Order and types of a state's tensors; nothing for attention."""
    if not hasattr(module, "get_state_dtype"):
        return []
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    order = "channels first" if is_conv_state_dim_first() else "channels last"
    return [order, *(str(dtype).removeprefix("torch.") for dtype in module.get_state_dtype())]
