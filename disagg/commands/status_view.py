"""What a router tells of its fleet, as tables for a terminal."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.commands.router_client import call_router
from disagg.errors import RemoteFault
from disagg.router.openapi.overview_answer import Overview

PATH = "/v1/disagg/status"
MAP_CELLS = 32
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
        parts += ["", draw_workers(body["workers"]), "", draw_pools(body["workers"])]
        parts += ["", draw_transfers(body["workers"])]
    else:
        parts += ["", Text("no workers", style="red")]
    return Group(*parts)


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


def draw_workers(workers: Iterable[Body]) -> Table:
    """Who is there, in which life and state, and what waits at each."""
    table = Table(
        *("worker", "role", "state", "epoch", "revision", "version", "wire", "address"), box=None
    )
    for name in ("running", "waiting", "to prefill", "reserved", "heard"):
        table.add_column(name, justify="right")
    for one in workers:
        low, high = one["wire"]
        state = Text(one["state"], STATE_STYLES.get(one["state"], ""))
        if not one["answered"]:
            state.append(f" no answer: {one['error']}", style="red")
        table.add_row(
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
    return table


def draw_pools(workers: Iterable[Body]) -> Table:
    """Every pool: free blocks, and per group what is held (█), findable (▒) and else (·)."""
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
                block_map(group["num_held"], group["num_cached"], usable),
                _number(group["num_held"]),
                _number(group["num_cached"]),
                *(("", "", "") if group["group"] else whole),
            )
    return table


def block_map(num_held: int | None, num_cached: int | None, num_blocks: int | None) -> Text:
    """A group's part of a pool; whatever there is has a sign."""
    if num_held is None or num_cached is None or not num_blocks:
        return Text("?" * 3, style="dim")
    held = min(MAP_CELLS, -(-num_held * MAP_CELLS // num_blocks))
    cached = min(MAP_CELLS - held, -(-num_cached * MAP_CELLS // num_blocks))
    shown = Text("█" * held, style="green").append("▒" * cached, style="cyan")
    return shown.append("·" * (MAP_CELLS - held - cached), style="dim")


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
