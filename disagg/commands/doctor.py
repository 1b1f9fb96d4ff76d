"""`disagg doctor`: this machine, the settings, a fleet; and for every finding what to do."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from disagg.commands.arguments import Config, Model, Set, read_effective
from disagg.commands.finding import Finding, Level, fault, has_fault
from disagg.commands.fleet_findings import look_at_router
from disagg.commands.machine_findings import look_at_machine
from disagg.commands.setup_findings import look_at_setup
from disagg.commands.transfer_findings import Ports, measure_pairs
from disagg.config import Settings
from disagg.errors import ConfigError
from disagg.router.options import FILES_BESIDE

PIPE_COLUMNS = 160
STYLES = {Level.OK: "green", Level.NOTE: "dim", Level.WARNING: "yellow", Level.FAULT: "bold red"}


def doctor(
    config: Config = None,
    model: Model = None,
    given: Set = None,
    url: Annotated[str, typer.Option("--url", help="Also a fleet: its router's admin port.")] = "",
    transfers: Annotated[
        bool, typer.Option("--transfers", help="Also real hand-overs between its workers.")
    ] = False,
    http_url: Annotated[
        str, typer.Option("--http-url", help="The router's clients' port, for --transfers.")
    ] = "http://127.0.0.1:8000",
    num_words: Annotated[
        int, typer.Option("--words", min=1, max=100_000, help="Of each prompt of --transfers.")
    ] = 64,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, help="Seconds to wait for an answer.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Look at this machine and at the settings; with --url at a fleet, and say what to do.

    The exit code is 1 where something has to be repaired first, else 0.
    """
    if transfers and not url:
        raise ConfigError(
            "--transfers: between the workers of which router? (--url)", param="--url"
        )
    findings = examine(config_of(config, model, given))
    if url:
        body, found = look_at_router(url, timeout_s)
        findings += found
        if transfers and body is not None:
            findings += measure_pairs(body, Ports(url, http_url, timeout_s), num_words)
    if as_json:
        print(json.dumps({"findings": [asdict(one) for one in findings]}, indent=2))
    else:
        width = None if sys.stdout.isatty() else PIPE_COLUMNS
        Console(width=width, highlight=False).print(draw(findings))
    raise typer.Exit(int(has_fault(findings)))


def config_of(config: Config, model: Model, given: Set) -> Settings | Finding:
    """The settings, or what is wrong with them."""
    try:
        return read_effective(config, given, model=model).settings
    except ConfigError as error:
        return fault("settings", error.message, "disagg config shows every setting and its source")


def examine(settings: Settings | Finding) -> list[Finding]:
    """This machine and what the settings name."""
    if isinstance(settings, Finding):
        return [*look_at_machine(Settings().limits.connections_max + FILES_BESIDE), settings]
    files_min = settings.limits.connections_max + FILES_BESIDE
    return [*look_at_machine(files_min), *look_at_setup(settings)]


def draw(findings: Iterable[Finding]) -> Table:
    """A row per finding, and below it what to do."""
    table = Table("", "what", Column("seen", overflow="fold"), box=None)
    for one in findings:
        seen = Text(one.seen)
        if one.advice:
            seen.append(f"\n→ {one.advice}", style="bold")
        table.add_row(Text(one.level, STYLES[one.level]), Text(one.subject), seen)
    return table
