"""What a router tells of its fleet, as tables for a terminal."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from disagg.commands.router_client import call_router
from disagg.errors import RemoteFault
from disagg.router.openapi.overview_answer import Overview

PATH = "/v1/disagg/status"
MAP_CELLS = 32
WIDE_COLUMNS = 130
NARROW_MAP_CELLS = 10
NARROW_LACKS = ("epoch", "revision", "version", "wire", "address")
"""Columns of workers that do not fit into 80 columns beside their queues."""
STATE_STYLES = {
    "ready": "green",
    "stalled": "red",
    "draining": "yellow",
    "starting": "yellow",
    "away": "red",
}
KINDS = {"full_attention": "full", "sliding_window": "window", "chunked_local": "chunk"}

Body = dict[str, Any]


def fetch(router_url: str, timeout_s: float) -> Body:
    """What the router knows and what its workers answer, with DISAGG_API_KEY.

    Raises:
        ConfigError: the URL is no http URL.
        RemoteFault: no router's admin port answers there in time, or the key may not observe.
    """
    told = call_router(router_url, PATH, timeout_s, scope="observe")
    try:
        Overview.model_validate(told, extra="ignore")  # a newer router says more
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{router_url} did not answer as a router does: {where}: {first['msg']}"
        raise RemoteFault(why) from error
    return told


def is_well(body: Body) -> bool:
    """Whether the router is ready, no wanted role is missing, and every worker answers."""
    router = body["router"]
    answered = all(worker["answered"] for worker in body["workers"])
    return bool(router["ready"] and not router["missing"] and answered)


def draw(body: Body) -> RenderableType:
    """All of it: the router, revisions where there are several, workers, pools, transfers."""
    parts: list[RenderableType] = [draw_router(body["router"])]
    if len(body["revisions"]) > 1:
        parts += ["", draw_revisions(body["revisions"])]
    if body["workers"]:
        parts += ["", _Workers(body["workers"]), "", draw_transfers(body["workers"])]
    else:
        parts += ["", Text("no workers", style="red")]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Workers:
    """Workers and their pools, cut down to what fits where a screen (`disagg top`) is narrow."""

    workers: list[Body]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.max_width < WIDE_COLUMNS
        yield draw_workers(self.workers, narrow=narrow)
        yield ""
        yield draw_pools(self.workers, narrow=narrow)


def draw_router(router: Body) -> Text:
    """The router in one or two lines."""
    line = Text(router["router_id"], style="bold")
    line.append(f"  disagg {router['version']}  serves {router['model']}  ", style="")
    if router["status"] != "ok":
        line.append(router["status"], style="yellow")
    else:
        line.append(*(("ready", "green") if router["ready"] else ("not ready", "red")))
    line.append(f"  {router['num_requests']} requests, {router['num_waiting']} of them wait here")
    if router["missing"]:
        line.append(f"\nno ready worker for: {', '.join(router['missing'])}", style="red")
    return line


def draw_revisions(revisions: Iterable[Body]) -> Table:
    """What is served side by side."""
    table = Table("revision", "weight", "ready", "running", "waiting", box=None)
    for one in revisions:
        ready = f"{one['num_workers_ready']}/{one['num_workers']}"
        cells = (one["name"], f"{one['weight']:g}", ready, one["num_running"], one["num_waiting"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def draw_workers(workers: Iterable[Body], *, narrow: bool) -> Table:
    """Who is there, in which life and state, and what waits at each."""
    texts = ("worker", "role", "state", "epoch", "revision", "version", "wire", "address")
    numbers = ("running", "waiting", "to prefill", "reserved", "heard")
    shown = [name for name in texts + numbers if not (narrow and name in NARROW_LACKS)]
    table = Table(box=None)
    for name in shown:
        table.add_column(name, justify="right" if name in numbers else "left")
    for one in workers:
        low, high = one["wire"]
        state = Text(one["state"], STATE_STYLES.get(one["state"], ""))
        if not one["answered"]:
            state.append(f" no answer: {one['error']}", style="red")
        cells: tuple[Text | str, ...] = (
            Text(one["worker_id"]),
            Text(one["role"]),
            state,
            Text(one["epoch"][:8]),
            Text(one["revision"]),
            Text(one["version"] or "?"),
            str(low) if low == high else f"{low}-{high}",
            Text(one["address"]),
            _number(one["num_running"]),
            _number(one["num_waiting"]),
            _number(one["num_prefill_tokens_queued"]),
            _number(one["num_reservations"]),
            f"{one['heard_ms_ago'] / 1000:.1f} s",
        )
        row = dict(zip(texts + numbers, cells, strict=True))
        table.add_row(*(row[name] for name in shown))
    return table


def draw_pools(workers: Iterable[Body], *, narrow: bool) -> Table:
    """Every pool: free blocks, and per group what is held (█), findable (▒) and else (·)."""
    num_cells = NARROW_MAP_CELLS if narrow else MAP_CELLS
    table = Table("pool", "group", "█ held  ▒ cached  · the rest of the pool", box=None)
    for name in ("held", "cached", "free", "of", "quarantined"):
        table.add_column(name, justify="right")
    for one in workers:
        pool = one["pool"]
        usable, quarantined = pool["num_blocks_usable"], pool["num_blocks_quarantined"]
        whole = (
            _number(pool["num_blocks_free"]),
            _number(usable),
            Text(_number(quarantined), "red" if quarantined else ""),
        )
        for group in pool["groups"]:
            name = KINDS.get(group["kind"], group["kind"])
            size = f" {group['window_tokens']}" if group["window_tokens"] else ""
            table.add_row(
                Text("" if group["group"] else one["worker_id"]),
                Text(f"{group['group']} {name}{size}"),
                block_map(group["num_held"], group["num_cached"], usable, num_cells),
                _number(group["num_held"]),
                _number(group["num_cached"]),
                *(("", "", "") if group["group"] else whole),
            )
    return table


def block_map(
    num_held: int | None, num_cached: int | None, num_blocks: int | None, num_cells: int
) -> Text:
    """A group's part of a pool; whatever there is has a sign."""
    if num_held is None or num_cached is None or not num_blocks:
        return Text("?" * 3, style="dim")
    held = min(num_cells, -(-num_held * num_cells // num_blocks))
    cached = min(num_cells - held, -(-num_cached * num_cells // num_blocks))
    shown = Text("█" * held, style="green").append("▒" * cached, style="cyan")
    return shown.append("·" * (num_cells - held - cached), style="dim")


def draw_transfers(workers: Iterable[Body]) -> RenderableType:
    """Who lends to whom, and what is being read."""
    pairs: dict[tuple[str, str], Counter[str]] = {}
    for one in workers:
        me = one["worker_id"]
        for lease in one["leases"]:
            pair = pairs.setdefault((me, lease["reader"]["worker_id"]), Counter())
            pair.update(leases=1, lent=lease["num_blocks"])
        for entry in one["inbound"]:
            pair = pairs.setdefault((entry["owner"]["worker_id"], me), Counter())
            pair.update(inbound=1, expected=entry["num_blocks"], reads=entry["num_reads"])
    if not pairs:
        return Text("no leases, no transfers", style="dim")
    table = Table("owner → reader", box=None)
    names = ("leases", "lent", "inbound", "expected", "reads")
    for name in ("leases", "blocks lent", "inbound", "blocks expected", "READs in flight"):
        table.add_column(name, justify="right")
    for (owner, reader), counts in sorted(pairs.items()):
        table.add_row(Text(f"{owner} → {reader}"), *(str(counts[name]) for name in names))
    return table


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)
