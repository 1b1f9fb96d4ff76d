"""`disagg top`: the fleet and the newest requests in a terminal, live."""

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.commands.router_client import DEFAULT_URL, TIMEOUT_S, Timeout, Url
from disagg.commands.signals import interrupt_on_signals
from disagg.commands.status_view import draw, fetch
from disagg.errors import ConfigError, RemoteFault

ROWS_MAX = 15


def top(
    url: Url = DEFAULT_URL,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.5, max=60, help="Seconds between two looks.")
    ] = 1.0,
    timeout_s: Timeout = TIMEOUT_S,
) -> None:
    """Show workers, pools, transfers and the newest requests, live, until Ctrl-C.

    It needs a terminal and a router's admin port; with keys, DISAGG_API_KEY has one that may
    observe. A router that goes away later is shown as such and looked for again.
    """
    if not sys.stdout.isatty():
        raise ConfigError("disagg top needs a terminal: disagg status --json is for programs")
    interrupt_on_signals()
    screens = watch(url, timeout_s, interval_s)
    console = Console(highlight=False)
    try:
        first = next(screens)
        with Live(first, console=console, auto_refresh=False, screen=True) as live:
            for screen in screens:
                live.update(screen, refresh=True)
    except KeyboardInterrupt:
        pass


def watch(url: str, timeout_s: float, interval_s: float) -> Iterator[RenderableType]:
    """A screen now and after each interval, for ever.

    Raises:
        RemoteFault: the first look fails; later ones are shown.
    """
    body = fetch(url, timeout_s)
    yield draw_screen(body, None)
    while True:
        time.sleep(interval_s)
        try:
            before, body = body, fetch(url, timeout_s)
        except RemoteFault as error:
            yield Group(Text(error.message, style="red"), "", draw_screen(body, None))
            continue
        yield draw_screen(body, before)


def draw_screen(body: dict[str, Any], before: dict[str, Any] | None) -> RenderableType:
    """The fleet and the newest requests; ``before``: the look before, for rates."""
    return Group(draw(body), "", draw_requests(body, before))


def draw_requests(body: dict[str, Any], before: dict[str, Any] | None) -> RenderableType:
    """The newest requests, and how fast tokens come to each."""
    if not body["requests"]:
        return Text("no requests yet", style="dim")
    names = ("request", "state", "where", "prompt", "tokens", "tokens/s", "first token", "so far")
    table = Table(box=None)
    for name in names:
        table.add_column(name, justify="right" if name not in names[:3] else "left")
    for one in body["requests"][:ROWS_MAX]:
        name = f"{one['tenant']}/{one['request_id']}" if one["tenant"] else one["request_id"]
        here = [one["prefill"], *([one["decode"]] if one["decode"] != one["prefill"] else [])]
        took_ms = (one["finished_ms"] or body["now_ms"]) - one["received_ms"]
        first_ms = one["first_token_ms"]
        table.add_row(
            Text(name, overflow="ellipsis", no_wrap=True),
            Text(one["state"]),
            Text(" → ".join(filter(None, here))),
            str(one["num_prompt_tokens"]),
            str(one["num_tokens"]),
            rate_of(one, body["now_ms"], before),
            "" if first_ms is None else f"{first_ms - one['received_ms']} ms",
            f"{took_ms / 1000:.1f} s",
        )
    return table


def rate_of(one: dict[str, Any], now_ms: int, before: dict[str, Any] | None) -> str:
    """Tokens per second since the look before; "" for what had ended or was not there then."""
    if before is None or now_ms <= before["now_ms"]:
        return ""
    for earlier in before["requests"]:
        same = all(earlier[name] == one[name] for name in ("request_id", "tenant", "received_ms"))
        if same and earlier["finished_ms"] is None:
            seconds = (now_ms - before["now_ms"]) / 1000
            return f"{(one['num_tokens'] - earlier['num_tokens']) / seconds:.1f}"
    return ""
