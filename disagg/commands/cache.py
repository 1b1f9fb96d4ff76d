"""`disagg cache`: stores of KV blocks on disks and in object stores."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from disagg.commands.arguments import Config, Set, read_effective
from disagg.commands.stored_kv import (
    UNREADABLE,
    chosen,
    contents_of,
    name_of,
    opened,
    parse_duration_s,
    places_in,
    places_of,
    remove,
    to_evict,
    verify,
)
from disagg.commands.table_console import table_console
from disagg.errors import ConfigError
from disagg.kv.shapes.memory_plan import format_memory, parse_memory

SHOWN_MAX = 20
"""Damaged blocks named in a text; ``--json`` names all."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Look after stores of KV blocks: the disk and object tiers of worker.tiers.\n\n"
        "Workers may run meanwhile: what they miss they compute.\n\n"
        "[bold]Examples[/bold]\n\n"
        "  disagg cache list /var/cache/disagg\n\n"
        "  disagg cache evict --config disagg.yaml --unused-for 7d"
    ),
)

StorePlace = Annotated[
    str | None,
    typer.Argument(metavar="[STORE]", help="Directory, URL or tier; default: worker.tiers."),
]
Contract = Annotated[
    str, typer.Option("--contract", help="Only contracts whose name (see list) begins so.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and keep it.")]


@app.command("list")
def list_contents(
    store: StorePlace = None,
    config: Config = None,
    settings_given: Set = None,
    contract: Contract = "",
    as_json: AsJson = False,
) -> None:
    """Show what each store has, by model: blocks, bytes, when they were last used."""
    answers = []
    for place in _places(store, config, settings_given):
        with opened(place) as one:
            answers.append((place, contents_of(one, contract)))
    if as_json:
        stores = [{"store": place, "contracts": [c.as_json() for c in of]} for place, of in answers]
        print(json.dumps({"stores": stores}, indent=2))
        return
    for place, found in answers:
        table = Table("contract", "model", "dtype", box=None)
        for name in ("blocks", "size", "last used", "unused since"):
            table.add_column(name, justify="right")
        for each in found:
            table.add_row(
                each.contract[:12],
                each.model[:12],
                each.dtype,
                f"{each.num_blocks:,}",
                format_memory(each.num_bytes),
                _time(each.newest_ns),
                _time(each.oldest_ns),
            )
        size = format_memory(sum(each.num_bytes for each in found))
        table_console().print(Text(f"{place}: {size}"), table if found else "")


@app.command("verify")
def verify_blocks(
    store: StorePlace = None,
    config: Config = None,
    settings_given: Set = None,
    contract: Contract = "",
    remove_damaged: Annotated[
        bool, typer.Option("--remove", help="Remove what is damaged; a reader would as well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block and check every byte. The exit code is 1 when one is damaged."""
    answers: list[dict[str, Any]] = []
    for place in _places(store, config, settings_given):
        with opened(place) as one:
            blocks = chosen(one, contract)
            with _progress("reading", sum(block.num_bytes for block in blocks)) as step:
                bad = verify(one, blocks, step)
            num_removed = 0
            if remove_damaged:
                damaged = [block for block, why in bad if why != UNREADABLE]
                num_removed = remove(one, damaged, lambda num_bytes: None)
        answers.append(
            {
                "store": place,
                "num_blocks": len(blocks),
                "damaged": [{"block": name_of(block), "why": why} for block, why in bad],
                "num_removed": num_removed,
            }
        )
    if as_json:
        print(json.dumps({"stores": answers}, indent=2))
    else:
        for answer in answers:
            _print_verified(answer)
    raise typer.Exit(int(any(answer["damaged"] for answer in answers)))


@app.command("evict")
def evict_blocks(
    store: StorePlace = None,
    config: Config = None,
    settings_given: Set = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Keep so much, e.g. 100GiB: the last used.")
    ] = None,
    unused_for: Annotated[
        str | None,
        typer.Option("--unused-for", help="What was not used for so long, e.g. 12h, 7d."),
    ] = None,
    contract: Contract = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove the blocks that were unused for longest."""
    if to is None and unused_for is None:
        raise ConfigError("what is to go? Give --to SIZE, --unused-for TIME, or both", param="--to")
    bytes_max = None if to is None else 0 if to == "0" else parse_memory(to)
    unused_s = None if unused_for is None else parse_duration_s(unused_for)
    answers = []
    for place in _places(store, config, settings_given):
        with opened(place) as one:
            blocks = to_evict(chosen(one, contract), bytes_max=bytes_max, unused_s=unused_s)
            answers.append(_remove(place, one, blocks, dry_run))
    _print_removed(answers, dry_run, as_json)


@app.command("clear")
def clear_blocks(
    store: StorePlace = None,
    config: Config = None,
    settings_given: Set = None,
    contract: Contract = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove every block. Files that are not blocks stay."""
    answers = []
    for place in _places(store, config, settings_given):
        with opened(place) as one:
            blocks = chosen(one, contract)
            if blocks and not (yes or dry_run):
                _confirm(place, len(blocks), sum(block.num_bytes for block in blocks))
            answers.append(_remove(place, one, blocks, dry_run))
    _print_removed(answers, dry_run, as_json)


def _places(store: str | None, config: Any, settings_given: list[str] | None) -> list[str]:
    if store is not None:
        return places_in(store)
    return places_of(read_effective(config, settings_given).settings)


def _confirm(place: str, num_blocks: int, num_bytes: int) -> None:
    what = f"{num_blocks:,} blocks ({format_memory(num_bytes)}) of {place}"
    if not sys.stdin.isatty():
        raise ConfigError(f"{what} would be removed: say --yes", param="--yes")
    typer.confirm(f"Remove {what}?", abort=True, err=True)


def _remove(place: str, store: Any, blocks: list[Any], dry_run: bool) -> dict[str, Any]:
    num_bytes = sum(block.num_bytes for block in blocks)
    num_blocks = len(blocks)
    if not dry_run:
        with _progress("removing", num_bytes) as step:
            num_blocks = remove(store, blocks, step)
    return {"store": place, "num_blocks": num_blocks, "num_bytes": num_bytes}


def _print_removed(answers: list[dict[str, Any]], dry_run: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"dry_run": dry_run, "stores": answers}, indent=2))
        return
    for answer in answers:
        size = format_memory(answer["num_bytes"])
        done = "would be removed" if dry_run else "removed"
        print(f"{answer['store']}: {answer['num_blocks']:,} blocks {done} ({size})")


def _print_verified(answer: dict[str, Any]) -> None:
    damaged = answer["damaged"]
    causes = Counter(one["why"] for one in damaged)
    said = ", ".join(f"{number:,} {why}" for why, number in sorted(causes.items())) or "all intact"
    gone = f"; {answer['num_removed']:,} removed" if answer["num_removed"] else ""
    print(f"{answer['store']}: {answer['num_blocks']:,} blocks, {said}{gone}")
    for one in damaged[:SHOWN_MAX]:
        print(f"  {one['why']}: {one['block']}")
    if len(damaged) > SHOWN_MAX:
        print(f"  and {len(damaged) - SHOWN_MAX:,} more (--json names all)")


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; elsewhere nothing is shown."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=num_bytes)
        yield lambda more: progress.update(task, advance=more)


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
