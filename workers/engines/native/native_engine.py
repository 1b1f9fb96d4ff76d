"""The engine over transformers' models: one forward pass over a packed batch, then sampling."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from disagg.errors import ConfigError
from disagg.grammar.compiler import GrammarCompiler
from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout, plan_layout
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.drafts import rows_of
from disagg.scheduling.engine_steps import EngineSteps, Failed, Scored, SliceSamples
from disagg.scheduling.step import SequenceSlice, Step, StepResult
from disagg.workers.engines.finite import NonFiniteError, non_finite
from disagg.workers.engines.forms import group_forms
from disagg.workers.engines.logprobs import prompt_logprobs
from disagg.workers.engines.native.attention import ATTENTION_NAME, BATCH_ARGUMENT, register
from disagg.workers.engines.native.checkpoint import Checkpoint, open_checkpoint
from disagg.workers.engines.native.latent_attention import hand_out_latents
from disagg.workers.engines.native.own_positions import scale_by_own_positions
from disagg.workers.engines.native.packed_batch import BatchBuilder, GroupShape, PackedBatch
from disagg.workers.engines.native.packed_linear import pack_linears
from disagg.workers.engines.native.paged_pool import PagedPool, pages_of
from disagg.workers.engines.native.row_logits import RowLogits
from disagg.workers.engines.native.sections import sections_of
from disagg.workers.engines.native.state_batch import StateGroup
from disagg.workers.engines.native.state_mixers import StateMixers
from disagg.workers.engines.protocol import Drafts
from disagg.workers.engines.sampler import Sampler
from disagg.workers.engines.start_phases import phase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FAILED = Failed("NonFiniteError: a hidden state or a logit is not finite")
"""A slice that read NaN, or whose numbers were too large. Nothing passes from one sequence of a
batch to another, so the others' tokens and KV are as without it."""


class NativeEngine:
    """See `Engine`. Between steps it keeps weights, pool and block tables.

    Who owns which block is the scheduler's business: the steps carry every table as it grows.

    Attributes:
        checkpoint: what the model directory holds.
        layout: KV cache groups and where their pages lie in a block.
        pool: the KV memory.
        region: the same as transports see it.
        fingerprint: hex digest of the model, part of the compatibility contract.
        dtype: of weights and KV, part of it too.
        forms: where in its blocks each group keeps what.
        page_format: K of all heads, then V of all heads; of states the recurrent one first.
        drafts: slots for the drafts that the scheduler looks up; it has no layers that draft.
        summary: what it took of its machine, in one line.
        vocab_size: token ids are below it.
        max_model_tokens: bound on prompt plus generated tokens.
    """

    page_format = "native: K, V; heads, tokens, head size; states: recurrent, convolution"

    def __init__(
        self,
        model_dir: str | Path,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: str = "cpu",
        num_threads: int = 1,
        num_speculative_tokens: int = 0,
        summary: str = "",
    ) -> None:
        """Load weights from disk and allocate the pool; nothing is downloaded.

        Raises:
            ConfigError: the checkpoint or a setting cannot be used; ``param`` names it.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}", param="dtype")
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads} is not positive", param="num_threads")
        where, kind = _device(device), DTYPES[dtype]
        self.dtype, self.summary = dtype, summary
        torch.set_num_threads(num_threads)
        self.checkpoint: Checkpoint = open_checkpoint(model_dir)
        self.fingerprint = self.checkpoint.fingerprint
        self.vocab_size = self.checkpoint.vocab_size
        self.max_model_tokens = self.checkpoint.max_model_tokens
        specs = self.checkpoint.layer_specs(block_tokens=block_tokens, dtype_bytes=kind.itemsize)
        self.layout: KVCacheLayout = plan_layout(specs)
        if num_speculative_tokens and any(keeps_states(group.spec) for group in self.layout.groups):
            raise ConfigError(
                f"scheduling.num_speculative_tokens={num_speculative_tokens}: the model has linear"
                " states, which cannot go back behind a draft that was wrong",
                param="scheduling.num_speculative_tokens",
            )
        self.drafts = Drafts(num_speculative_tokens)
        self.forms = group_forms(self.layout, sections_of)
        weight_bytes = self.checkpoint.num_weights * kind.itemsize
        with phase("weights", where.type, expected_bytes=weight_bytes):
            self._model = _load(self.checkpoint, kind, where)
            if where.type == "cpu":
                self.summary = f"{summary}, {pack_linears(self._model)}"
        self._rows = RowLogits(self._model)
        with phase("KV pool", where.type):
            self.pool = PagedPool(
                self.layout,
                num_blocks=num_blocks,
                dtype=kind,
                device=where,
                kv_owners=self.checkpoint.kv_owners,
            )
        self._mixers = StateMixers(
            self._model,
            self.layout,
            self.pool.tensor,
            kind,
            # Where every layer has attention and a state, all the states come after.
            first_layer=len(specs) - self.checkpoint.config.num_hidden_layers,
        )
        self.region = self.pool.region
        self._steps = EngineSteps(self.lay_out, self._compute)
        self._tables = BlockTables(len(self.layout.groups), num_blocks)
        self._sampler = Sampler(GrammarCompiler(self.checkpoint.path))
        self._builder = BatchBuilder(
            self.pool.layers,
            [_group_shape(group) for group in self.layout.groups],
            vocab_size=self.vocab_size,
            max_model_tokens=self.max_model_tokens,
            device=where,
        )

    def prepare(self, step: Step) -> None:
        """Make the step's table changes and lay out its forward pass, while others run."""
        self._steps.prepare(step)

    def run(self, step: Step) -> StepResult:
        """Compute a step; blocks until it is done.

        Writes KV of the slices' tokens into their blocks and nowhere else. Whatever goes wrong
        comes back as ``error``; the blocks written then hold nothing to be relied on.
        """
        with torch.inference_mode():
            return self._steps.run(step)

    def close(self) -> None:
        """Drop the weights; later steps fail. The pool stays: peers may still read it."""
        self._model = None
        self._rows.close()

    def lay_out(self, step: Step) -> PackedBatch:
        """Make the step's table changes and lay out its forward pass.

        Raises:
            ValueError: see ``BlockTables.apply`` and ``BatchBuilder.build``.
        """
        self._tables.apply(step)
        return self._builder.build(step.slices, self._tables.of(step.slices))

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Run the model once; returns the logits [sampled rows, vocab_size], finite or not."""
        if self._model is None:
            raise RuntimeError("the engine is closed")
        self._mixers.calls = batch.states
        output = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.sampled_rows,
            **{BATCH_ARGUMENT: batch},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _compute(self, batch: PackedBatch, step: Step) -> tuple[SliceSamples, ...]:
        self._sampler.apply(step.ended, step.slices)
        if len(step.slices) < batch.num_slices:  # the step before it failed
            batch = self._builder.build(step.slices, batch.tables)
        batch.put_tokens(step.slices)
        logits = self.forward(batch)
        samples: list[SliceSamples] = [None] * len(step.slices)
        # Every token attends to itself, so what it wrote into the pool is covered as well.
        lengths = [len(part.token_ids) for part in step.slices]
        for index in non_finite(self._rows.hidden_states, lengths):
            samples[index] = _FAILED
        self._sample(batch.sampled, step.slices, logits, samples)
        self._score(batch, step.slices, samples)
        self._rows.forget()
        return tuple(samples)

    def _sample(
        self,
        sampled: Sequence[int],
        slices: Sequence[SequenceSlice],
        logits: torch.Tensor,
        samples: list[SliceSamples],
    ) -> None:
        """Draw tokens for the slices that were computed; whose logits are not finite fails too."""
        num_rows = [1 + slices[index].num_drafts for index in sampled]
        for number in non_finite(logits, num_rows):
            samples[sampled[number]] = _FAILED
        drawing = [index for index in sampled if samples[index] is not _FAILED]
        if not drawing:
            return
        if len(drawing) < len(sampled):
            of_rows = [index for index, n in zip(sampled, num_rows, strict=True) for _ in range(n)]
            logits = logits[[row for row, index in enumerate(of_rows) if index in drawing]]
        rows = [row for index in drawing for row in rows_of(slices[index])]
        tokens = iter(self._sampler.sample(logits, rows))
        for index in drawing:
            num_drafts = slices[index].num_drafts
            drawn = tuple(islice(tokens, 1 + num_drafts))
            samples[index] = drawn if num_drafts else drawn[0]

    def _score(
        self, batch: PackedBatch, slices: Sequence[SequenceSlice], samples: list[SliceSamples]
    ) -> None:
        """Add to the samples what the model thinks of prompts."""

        def logits_of(first: int, end: int) -> torch.Tensor:
            return self._rows.of(batch.input_ids, first, end)

        row = 0
        for index, part in enumerate(slices):
            sampled = samples[index]
            if part.scored_token_ids and not isinstance(sampled, Failed):
                assert not isinstance(sampled, tuple | Scored)  # who is scored has no drafts
                try:
                    found = prompt_logprobs(part, row, self.vocab_size, logits_of)
                    samples[index] = Scored(sampled, found)
                except NonFiniteError:
                    samples[index] = _FAILED
            row += len(part.token_ids)


def _group_shape(group: KVCacheGroup) -> GroupShape | StateGroup:
    if keeps_states(group.spec):
        return StateGroup(group.spec.block_tokens, group.blocks_per_state)
    return GroupShape(group.spec, pages_of(group.spec))


def _device(name: str) -> torch.device:
    if name != "cpu" and name.partition(":")[0] != "cuda":
        raise ConfigError(f"device={name!r} is neither cpu nor cuda[:n]", param="device")
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch finds no CUDA device", param="device")
    return torch.device(name)


_UNLOADABLE = (
    AttributeError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
"""What transformers raises for what the checks before it have let through."""


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation=ATTENTION_NAME,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except _UNLOADABLE as error:
        raise ConfigError(f"{checkpoint.path}: {error}", param="model.safetensors") from error
    model, report = loaded
    # transformers fills missing weights with random numbers and only logs a line.
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(kind):
            raise ConfigError(
                f"{checkpoint.path}: weights with {kind} {sorted(map(str, report[kind]))[:5]}",
                param="model.safetensors",
            )
    if type(model).__name__ != checkpoint.architecture:
        raise ConfigError(
            f"config.json: architectures={checkpoint.architecture}, but model_type loads "
            f"{type(model).__name__}",
            param="architectures",
        )
    model.requires_grad_(False)
    model.eval().to(device)
    hand_out_latents(model)
    scale_by_own_positions(model)
    return model
