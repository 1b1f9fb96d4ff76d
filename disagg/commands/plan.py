"""What ``disagg plan`` prints: a model's KV cache in a memory budget."""

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from disagg.commands.table_console import table_console
from disagg.errors import ConfigError
from disagg.kv.shapes.memory_plan import (
    MemoryPlan,
    all_layers_full,
    format_memory,
    parse_memory,
    plan_memory,
)
from disagg.kv.shapes.model_shapes import ModelShape, read_shape
from disagg.workers.engines.block_tokens import planned_block_tokens
from disagg.workers.engines.checkpoint_files import read_json, why_pickled
from disagg.workers.options import AUTO


class EngineName(StrEnum):
    """The engines by their settings' names."""

    NATIVE = "native"
    VLLM = "vllm"


class DeviceName(StrEnum):
    """Where a worker computes, as worker.device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def plan_kv_memory(
    model: Annotated[Path, typer.Option("--model", "-m", help="Directory with a config.json.")],
    memory: Annotated[str, typer.Option("--memory", help="KV budget of a worker, e.g. 64GiB.")],
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sequence; default: the longest.")
    ] = None,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Whose blocks: they differ for linear states.")
    ] = EngineName.NATIVE,
    device: Annotated[
        DeviceName,
        typer.Option("--device", help="As worker.device; the vllm engine's blocks differ."),
    ] = DeviceName.AUTO,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens", min=1, help="As worker.block_tokens; default: what the engine takes."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print how a model's KV cache fits into a memory budget."""
    report = MemoryReport(model, memory, context, engine, device, block_tokens)
    if said := why_pickled(model):  # no weights are needed here, but the next command wants them
        print(f"disagg: {said}", file=sys.stderr)
    if as_json:
        print(report.as_json())
        return
    report.print_to(table_console())


class MemoryReport:
    """Plans of one model: as it is, and with all layers full.

    The arithmetic is that of the engine's own start; the engine itself need not be installed.

    Args:
        model_dir: directory with a config.json; nothing else is read.
        memory: budget of one worker, such as ``64GiB``.
        context_tokens: length of the sequences to count; None: the model's longest.
        engine: vLLM's kernels need a layer's state whole in one block.
        device: of the worker; `DeviceName.AUTO` is this machine's.
        block_tokens: tokens per block, None for what the engine takes; where states lie whole, the
            planned one is a multiple.

    Raises:
        ConfigError: config.json or an argument cannot be used; ``param`` names it.
    """

    def __init__(
        self,
        model_dir: Path,
        memory: str,
        context_tokens: int | None,
        engine: EngineName,
        device: DeviceName = DeviceName.AUTO,
        block_tokens: int | None = None,
    ) -> None:
        memory_bytes = parse_memory(memory)
        self.engine = engine
        if engine is EngineName.VLLM and device is DeviceName.AUTO:
            device = _this_device()
        self.device = device
        block_tokens = planned_block_tokens(engine, device, block_tokens or AUTO)
        self.shape: ModelShape = read_shape(
            read_json(model_dir / "config.json"), block_tokens=block_tokens
        )
        context = context_tokens if context_tokens is not None else self.shape.max_model_tokens
        if context_tokens is None and not context:
            raise ConfigError(
                "config.json: max_position_embeddings is missing; give --context", param="context"
            )
        if 0 < self.shape.max_model_tokens < context:
            raise ConfigError(
                f"context: {context} tokens, the model's positions reach "
                f"{self.shape.max_model_tokens}",
                param="context",
            )
        specs = self.shape.layer_specs
        whole = engine is EngineName.VLLM
        self.plan: MemoryPlan = plan_memory(specs, memory_bytes, context, whole_states=whole)
        self.full: MemoryPlan = plan_memory(
            all_layers_full(specs), memory_bytes, context, whole_states=whole
        )

    @property
    def _engine_text(self) -> str:
        # The native engine's blocks are the same everywhere.
        where = f" on {self.device}" if self.engine is EngineName.VLLM else ""
        return f"{self.engine} engine{where}"

    def as_json(self) -> str:
        """The report for programs; sizes in bytes."""
        plan = self.plan
        answer: dict[str, Any] = {
            "architecture": self.shape.architecture,
            "engine": self.engine,
            "memory_bytes": plan.memory_bytes,
            "context_tokens": plan.context_tokens,
            "block_bytes": plan.layout.block_bytes,
            "num_blocks": plan.num_blocks,
            "groups": [asdict(group) for group in plan.groups],
            **_capacity(plan),
            "all_layers_full": _capacity(self.full),
        }
        return json.dumps(answer, indent=2)

    def print_to(self, console: Console) -> None:
        """Print the plan as a table for people."""
        plan, full = self.plan, self.full
        table = Table(box=None, header_style="bold")
        for name in ("group", "kind"):
            table.add_column(name)
        for name in (
            "layers",
            "window",
            "block",
            "bytes/token",
            "state",
            "padding",
            "blocks/sequence",
        ):
            table.add_column(name, justify="right")
        for group in plan.groups:
            blocks = "blocks" if group.blocks_per_state > 1 else "block"
            state = f"{format_memory(group.state_bytes)} in {group.blocks_per_state} {blocks}"
            share = group.padding_bytes / (plan.layout.block_bytes * group.blocks_per_state)
            padding = f"{format_memory(group.padding_bytes)} ({share:.1%})"
            table.add_row(
                str(group.group),
                group.kind,
                str(group.num_layers),
                f"{group.window_tokens:,}" if group.window_tokens else "-",
                str(group.block_tokens),
                f"{group.token_bytes:,}" if group.token_bytes else "-",
                state if group.state_bytes else "-",
                padding if group.padding_bytes else "0",
                f"{group.blocks_per_sequence:,}",
            )
        console.print(
            f"{self.shape.architecture}: {plan.num_blocks:,} blocks of "
            f"{format_memory(plan.layout.block_bytes)} in {format_memory(plan.memory_bytes)}, "
            f"sequences of {plan.context_tokens:,} tokens, {self._engine_text}",
            markup=False,
        )
        console.print(table)
        compared = Table("", "tokens that fit", "sequences at once", "a sequence", box=None)
        for name, each in (("this plan", plan), ("all layers full", full)):
            held = each.blocks_per_sequence * each.layout.block_bytes
            compared.add_row(
                name, f"{each.num_tokens:,}", f"{each.num_sequences:,}", format_memory(held)
            )
        console.print(compared)


def _this_device() -> DeviceName:
    from disagg.workers import machine  # imports torch, which takes seconds

    return DeviceName.CUDA if machine.has_gpu() else DeviceName.CPU


def _capacity(plan: MemoryPlan) -> dict[str, int]:
    return {
        "blocks_per_sequence": plan.blocks_per_sequence,
        "sequence_bytes": plan.blocks_per_sequence * plan.layout.block_bytes,
        "num_tokens": plan.num_tokens,
        "num_sequences": plan.num_sequences,
    }
