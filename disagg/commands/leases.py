"""`disagg leases`: the view as a table, once or again and again."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.commands.leases_view import (
    WorkerLeases,
    as_json,
    ask_workers,
    find_workers,
    key_text,
    worker_text,
)
from disagg.commands.router_client import DEFAULT_URL, Timeout, Url
from disagg.commands.signals import interrupt_on_signals
from disagg.commands.table_console import table_console
from disagg.errors import RemoteFault


def leases(
    url: Url = DEFAULT_URL,
    watch: Annotated[bool, typer.Option("--watch", help="Every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout_s: Timeout = 3.0,
    tls_directory: Annotated[
        str,
        typer.Option(
            "--tls-directory",
            envvar="DISAGG_CLUSTER__TLS_DIRECTORY",
            help="Certificate of a node: the workers answer nobody else.",
        ),
    ] = "",
) -> None:
    """Show leases, inbound transfers, reservations and quarantine of every worker.

    Where the router has API keys, DISAGG_API_KEY has one that may observe.
    The exit code is 1 when a worker does not answer, 2 when no router does.
    """
    if watch:
        interrupt_on_signals()
    look = partial(_look, url, timeout_s, tls_directory)
    raise typer.Exit(show_leases(look, as_text=not as_json, watch=watch))


Look = Callable[[], list[WorkerLeases]]


def show_leases(look: Look, *, as_text: bool, watch: bool) -> int:
    """Print what all workers lend, pull and hold back.

    Args:
        look: asks the router for its workers, and them for theirs.
        as_text: a table, else JSON (with ``watch`` one line per look).
        watch: look every second until interrupted; a router that is away is shown as such.

    Returns:
        The exit code: 0, or 1 when a worker did not answer.

    Raises:
        DisaggError: no router answers (unless watching, when it answered before).
    """
    answers = look()
    if not watch:
        if as_text:
            table_console().print(draw(answers))
        else:
            print(json.dumps(as_json(answers), indent=2))
        return int(any(answer.status is None for answer in answers))
    try:
        if as_text:
            _watch(answers, look)
        else:
            _watch_json(answers, look)
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    return 0


def draw(answers: list[WorkerLeases]) -> Group:
    """One table of workers, one of leases, one of inbound transfers."""
    workers = Table(
        "worker", "role", "address", "blocks free", "reserved", "quarantined", "state", box=None
    )
    leases = Table("owner", "lease", "request", "reader", "state", "blocks", box=None)
    inbound = Table("reader", "request", "owner", "state", "blocks", "reading", box=None)
    for answer in answers:
        worker, status = answer.worker, answer.status
        who = Text(worker.worker_id)
        if status is None:
            failed = Text(f"no answer: {answer.error}", style="red")
            workers.add_row(who, Text(worker.role), Text(worker.address), "?", "?", "?", failed)
            continue
        stats = status.stats
        held_back = Text(str(stats.num_blocks_quarantined))
        held_back.stylize("red" if stats.num_blocks_quarantined else "")
        workers.add_row(
            who,
            Text(worker.role),
            Text(worker.address),
            f"{stats.num_blocks_free}/{stats.num_blocks_usable}",
            str(stats.num_reservations),
            held_back,
            "ready" if stats.ready else Text("not ready", style="red"),
        )
        for lease in status.leases:
            leases.add_row(
                who,
                str(lease.lease_id),
                Text(key_text(lease.key)),
                Text(worker_text(lease.reader)),
                Text(lease.state),
                str(lease.num_blocks),
            )
        for entry in status.inbound:
            inbound.add_row(
                who,
                Text(key_text(entry.key)),
                Text(worker_text(entry.owner)),
                Text(entry.state),
                str(entry.num_blocks),
                str(entry.num_reads_in_progress),
            )
    parts = [("leases", leases), ("inbound transfers", inbound)]
    shown = [part if part.row_count else Text(f"no {name}", style="dim") for name, part in parts]
    return Group(workers, "", shown[0], "", shown[1])


def _look(router_url: str, timeout_s: float, tls_directory: str) -> list[WorkerLeases]:
    return ask_workers(find_workers(router_url, timeout_s), timeout_s, tls_directory)


def _watch(answers: list[WorkerLeases], look: Look) -> None:
    # A screen is as wide as it is.
    console = Console(highlight=False) if sys.stdout.isatty() else table_console()
    with Live(
        draw(answers), console=console, auto_refresh=False, screen=console.is_terminal
    ) as live:
        while True:
            time.sleep(1)
            try:
                shown = draw(look())
            except RemoteFault as error:
                shown = Group(Text(error.message, style="red"))
            live.update(shown, refresh=True)


def _watch_json(answers: list[WorkerLeases], look: Look) -> None:
    shown = json.dumps(as_json(answers))
    while True:
        print(shown, flush=True)
        time.sleep(1)
        try:
            shown = json.dumps(as_json(look()))
        except RemoteFault as error:
            shown = json.dumps({"workers": [], "error": error.message})
