"""Draws what happened to a request: answer, workers, and a map of its KV blocks."""

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
    """One request as a panel."""
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
    table = Table("", "pulled", "moving every block", "saved", title="KV moved, all requests")
    kinds: dict[str, list[int]] = {}
    for answer in answers:
        transfer = answer.record["generations"][-1]["transfer"]
        for group in transfer["groups"] if transfer else ():
            total = kinds.setdefault(group["kind"], [0, 0])
            total[0] += group["pulled_bytes"]
            total[1] += group["full_bytes"]
    kinds["all groups"] = [sum(column) for column in zip(*kinds.values(), strict=True)] or [0, 0]
    for kind, (pulled, full) in kinds.items():
        saved = f"{100 - 100 * pulled / full:.0f} %" if full else "-"
        table.add_row(_NAMES.get(kind, kind), _size(pulled), _size(full), saved)
    console.print(table)
    console.print(
        f"{num_right} of {len(answers)} answers right, {num_same} of {len(answers)} the same as "
        "one process with plain transformers."
    )


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
    padding = f" ({_size(pulled - useful)} of it padding)" if pulled > useful else ""
    share = 100 * pulled / full if full else 0
    return Text(
        f"pulled {_size(pulled)}{padding}: {share:.0f} % of moving every block, "
        f"in {transfer['read_ms']} ms; decodable {transfer['exposed_ms']} ms after the prefill"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes < 1 << 20 else f"{num_bytes / 2**20:.1f} MiB"
