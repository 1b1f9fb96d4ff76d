"""Draws one request: answer, workers, and a map of its KV blocks."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.asking import Answer

_BLOCKS = {"p": ("█", "green"), "h": ("▒", "cyan"), ".": ("·", "dim")}
_SHORT = {"full_attention": "full", "sliding_window": "window"}
_NAMES = {"full_attention": "full attention", "sliding_window": "sliding window"}


def legend() -> Text:
    """What the signs of the map mean."""
    text = Text("One sign is one KV block of a group; numbers: blocks pulled of all, bytes pulled.")
    for sign, word in (
        ("p", "pulled over NIXL"),
        ("h", "already here (prefix hit)"),
        (".", "null: out of the window, never allocated, never moved"),
    ):
        shape, style = _BLOCKS[sign]
        text.append(f"\n  {shape} ", style).append(word)
    return text


def draw(answer: Answer, single_process: str) -> RenderableType:
    """Draw one request as a panel."""
    prompt, record = answer.prompt, answer.record
    generation = record["generations"][-1]
    question = prompt.text if prompt.kind == "completion" else prompt.messages[-1][1]
    right = answer.text.strip() == prompt.expected
    same = answer.text.strip() == single_process
    said = Text(f"… {question[-46:]}  →  ", "dim")
    said.append(answer.text.strip() or "(nothing)", "bold")
    said.append(
        "   right" if right else f"   expected {prompt.expected}", "green" if right else "red"
    )
    said.append(
        "   same as one process" if same else f"   one process says {single_process}",
        "green" if same else "red",
    )
    facts = Text(
        f"prefill {generation['prefill']['worker_id']} "
        f"({generation['computed_tokens']} of {answer.num_prompt_tokens} tokens computed, "
        f"{generation['hit_tokens']} hit)  "
        f"decode {generation['decode']['worker_id']} ({answer.num_tokens} tokens)  "
        f"TTFT {answer.ttft_ms:.0f} ms  TPOT {answer.tpot_ms:.1f} ms"
    )
    parts: list[RenderableType] = [said, facts]
    pull = generation["pull"]
    if pull is not None and not pull["failed"]:
        where = f"{pull['num_tokens']} tokens of history from {pull['owner']['worker_id']}:"
        parts += [Text(where), _map(pull)]
    transfer = generation["transfer"]
    if transfer is None:
        parts.append(Text("no transfer: prefilled where it was decoded", "yellow"))
    else:
        parts += [_map(transfer), _cost(transfer)]
    if len(record["generations"]) > 1:
        causes = ", ".join(one["cause"] for one in record["generations"][:-1])
        parts.append(Text(f"planned {len(record['generations'])} times: {causes}", "yellow"))
    title = f"{prompt.name} · {prompt.kind}"
    if prompt.follows:
        title += f" · shares its beginning with {prompt.follows}"
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))


def summary(console: Console, answers: list[Answer], num_right: int, num_same: int) -> None:
    """The totals of all requests."""
    table = Table(
        "",
        "pulled",
        "every block\nnot cached",
        "saved by\nwindows",
        "every\nblock",
        "saved by\nprefix",
        title="KV moved, all requests",
    )
    kinds: dict[str, list[int]] = {}
    for answer in answers:
        transfer = answer.record["generations"][-1]["transfer"]
        for group, uncached in uncached_bytes(transfer["groups"]) if transfer else ():
            total = kinds.setdefault(group["kind"], [0, 0, 0])
            for column, count in enumerate((group["pulled_bytes"], uncached, group["full_bytes"])):
                total[column] += count
    kinds["all groups"] = [sum(column) for column in zip(*kinds.values(), strict=True)] or [0] * 3
    for kind, (pulled, uncached, full) in kinds.items():
        table.add_row(
            _NAMES.get(kind, kind),
            _size(pulled),
            _size(uncached),
            _saved(pulled, uncached),
            _size(full),
            _saved(uncached, full),
        )
    console.print(table)
    console.print(
        f"{num_right} of {len(answers)} answers right, {num_same} of {len(answers)} the same as "
        "one process with plain transformers."
    )


def uncached_bytes(groups: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each group of a transfer with the bytes of all its blocks that are not cached at the reader.

    This is what a system with the same prefix cached would move without windows. What is cached is
    what the full-attention groups have; windows count as if they had it too.
    """
    full = [group for group in groups if group["kind"] == "full_attention"]
    num_cached = min(
        (group["block_map"].count("h") * group["block_tokens"] for group in full), default=0
    )
    for group in groups:
        block_bytes = group["full_bytes"] // group["full_blocks"]
        yield group, group["full_bytes"] - num_cached // group["block_tokens"] * block_bytes


def _map(transfer: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, justify="right")
    for group in transfer["groups"]:
        name = _SHORT.get(group["kind"], group["kind"])
        if group["window_tokens"]:
            name += f" {group['window_tokens']}"
        row = Text()
        for sign in group["block_map"]:
            shape, style = _BLOCKS[sign]
            row.append(shape, style)
        table.add_row(
            f"{group['group']} {name}",
            row,
            f"{group['pulled_blocks']} of {group['full_blocks']}",
            _size(group["pulled_bytes"]),
        )
    return table


def _cost(transfer: dict[str, Any]) -> Text:
    groups = transfer["groups"]
    pulled, useful, full = (
        sum(group[key] for group in groups)
        for key in ("pulled_bytes", "useful_bytes", "full_bytes")
    )
    uncached = sum(count for _, count in uncached_bytes(groups))
    padding = f" ({_size(pulled - useful)} of it padding)" if pulled > useful else ""
    cached = f" (cached: {_size(full - uncached)})" if uncached < full else ""
    return Text(
        f"pulled {_size(pulled)}{padding}; every block not cached: {_size(uncached)}{cached}; "
        f"in {transfer['read_ms']} ms; decodable {transfer['exposed_ms']} ms after the prefill"
    )


def _saved(moved: int, without: int) -> str:
    """Share of ``without`` that is not moved."""
    return f"{100 - 100 * moved / without:.0f} %" if without else "-"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes < 1 << 20 else f"{num_bytes / 2**20:.1f} MiB"
