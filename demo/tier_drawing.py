"""Draws where the KV of a prompt came from: computed, or loaded from the disk."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.asking import Answer
from demo.model import WINDOW_TOKENS

BLOCK_TOKENS = 8
_SIGNS = {"c": ("█", "green"), "l": ("▓", "magenta"), ".": ("·", "dim")}


@dataclass(frozen=True, slots=True)
class Load:
    """Where the blocks of a prompt came from.

    Attributes:
        maps: a sign per block of each group, ``window`` and ``full``: ``c`` computed, ``l`` loaded,
            ``.`` out of the window, so not loaded.
        hit_tokens: that were there or loaded, as the router's record says.
        num_read: blocks that the worker read from the disk, as it counts them itself.
        num_written: blocks that it wrote.
        read_ms: time of the threads that read them.
    """

    maps: Mapping[str, str]
    hit_tokens: int
    num_read: int
    num_written: int
    read_ms: float

    @classmethod
    def of(cls, answer: Answer, counts: Mapping[str, float]) -> "Load":
        """What one answer took, from its record and from what the worker counted meanwhile."""
        hit_tokens = answer.record["generations"][-1]["hit_tokens"]
        num_blocks = -(-answer.num_prompt_tokens // BLOCK_TOKENS)
        end = hit_tokens // BLOCK_TOKENS
        seen = max(0, hit_tokens - WINDOW_TOKENS + 1) // BLOCK_TOKENS
        computed = "c" * (num_blocks - end)
        return cls(
            {
                f"window {WINDOW_TOKENS}": "." * seen + "l" * (end - seen) + computed,
                "full": "l" * end + computed,
            },
            hit_tokens,
            int(counts.get("tier_blocks_read", 0)),
            int(counts.get("tier_blocks_written", 0)),
            counts.get("tier_read_seconds", 0.0) * 1000,
        )

    @property
    def num_loaded(self) -> int:
        """Blocks drawn as loaded."""
        return sum(row.count("l") for row in self.maps.values())


def tier_legend(num_blocks: int) -> Text:
    """What the signs of the map mean, and what is shown."""
    text = Text(
        f"The pool has {num_blocks - 1} blocks of {BLOCK_TOKENS} tokens; a prompt with its windows"
        " in full would take 160 and more. What is computed is written to the disk meanwhile."
    )
    for sign, word in (
        ("c", "computed"),
        ("l", "loaded from the disk"),
        (".", "out of the window: not loaded, no memory"),
    ):
        shape, style = _SIGNS[sign]
        text.append(f"\n  {shape} ", style).append(word)
    return text


def draw_load(answer: Answer, single_process: str, occasion: str, load: Load) -> RenderableType:
    """Draw one request as a panel."""
    same = answer.text.strip() == single_process
    said = Text(f"… {answer.prompt.text[-46:]}  →  ", "dim")
    said.append(answer.text.strip() or "(nothing)", "bold")
    said.append(
        "   same as one process" if same else f"   one process says {single_process}",
        "green" if same else "red",
    )
    num_computed = answer.num_prompt_tokens - load.hit_tokens
    if load.hit_tokens:
        facts = (
            f"{load.hit_tokens} tokens loaded: {load.num_read} blocks in {load.read_ms:.0f} ms; "
            f"{num_computed} of {answer.num_prompt_tokens} computed"
        )
    else:
        facts = f"{num_computed} of {answer.num_prompt_tokens} tokens computed"
    if load.num_written:
        facts += f"; {load.num_written} blocks written to the disk"
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True, justify="right")
    for name, signs in load.maps.items():
        row = Text()
        for sign in signs:
            row.append(*_SIGNS[sign])
        table.add_row(name, row, f"{signs.count('l')} of {len(signs)} loaded")
    parts: list[RenderableType] = [
        said,
        Text(f"{facts}; first token after {answer.ttft_ms:.0f} ms"),
        table,
    ]
    title = f"{answer.prompt.name} · {occasion}"
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))
