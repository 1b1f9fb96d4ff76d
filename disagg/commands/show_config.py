"""`disagg config`: every setting, its value and where it came from."""

import json
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from disagg.commands.arguments import Config, Set, read_effective
from disagg.commands.table_console import table_console
from disagg.config import Effective, Settings


def show_config(
    config: Config = None,
    settings_given: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print every setting, its value and where it came from."""
    rows = _rows(read_effective(config, settings_given))
    if as_json:
        values = {key: {"value": value, "source": source} for key, value, source in rows}
        print(json.dumps(values, indent=2))
        return
    value = Column("value", overflow="fold")
    table = Table(Column("setting", no_wrap=True), value, Column("from", no_wrap=True), box=None)
    for key, value, source in rows:
        style = "dim" if source == "default" else "bold"
        cells = (key, json.dumps(value), source)
        table.add_row(*map(Text, cells), style=style)  # rich would read [x] as a style
    table_console().print(table)


def _rows(effective: Effective) -> list[tuple[str, Any, str]]:
    rows: list[tuple[str, Any, str]] = []
    for section, values in effective.settings.model_dump(mode="json").items():
        for key, value in values.items():
            dotted = f"{section}.{key}"
            hidden = dotted in Settings.secrets() and value
            rows.append((dotted, "***" if hidden else value, effective.sources[dotted]))
    return rows
