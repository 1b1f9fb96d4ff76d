"""`disagg keys`: API keys in a file that routers read, and the secret of a cluster."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from disagg.cluster.hash_key import make_hash_key
from disagg.commands.arguments import Config, Set, read_effective
from disagg.commands.table_console import table_console
from disagg.errors import ConfigError
from disagg.router.callers import SERVE
from disagg.router.keys import KeyEntry, KeyFile, hash_of, new_key, parse_keys
from disagg.tls.given_file import expanded, read_given, write_given

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Make and revoke API keys. Routers read the file anew when it changes.\n\n"
        "[bold]Examples[/bold]\n\n"
        "  disagg keys create --file keys.json --tenant alice --name laptop\n\n"
        "  disagg keys create --file keys.json --tenant ops --name grafana --scope observe\n\n"
        "  disagg keys revoke --file keys.json laptop"
    ),
)

KeysPath = Annotated[
    Path | None, typer.Option("--file", "-f", help="File of keys; default: router.api_keys_file.")
]


@app.command()
def create(
    tenant: Annotated[str, typer.Option("--tenant", help="Whose key it is.")],
    name: Annotated[str, typer.Option("--name", help="What the key is called; no two alike.")],
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="serve (default), observe or admin.")
    ] = None,
    file: KeysPath = None,
    config: Config = None,
    settings_given: Set = None,
) -> None:
    """Make a key and print it: this once, as the file keeps its hash alone."""
    path, key = _path(file, config, settings_given), new_key()
    entry = KeyEntry.model_construct(
        name=name,
        tenant=tenant,
        scopes=tuple(sorted(set(scope or [SERVE]))),
        sha256=hash_of(key),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with _locked(path):
        known = _read(path) if path.exists() else ()
        data = _checked((*known, entry))
        print(key, flush=True)  # first: a key that nobody has seen is not to open anything
        _write(path, data)
    print(f"{name}, of {tenant}, is in {path}; the key is shown this once", file=sys.stderr)


@app.command("list")
def list_keys(
    file: KeysPath = None,
    config: Config = None,
    settings_given: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show whose keys there are and what they are for."""
    fields = ("name", "tenant", "scopes", "created")
    known = _read(_path(file, config, settings_given))
    if as_json:
        shown = [entry.model_dump(include=set(fields)) for entry in known]
        print(json.dumps({"keys": shown}, indent=2))
        return
    table = Table(*fields, box=None)
    for key in known:
        table.add_row(key.name, key.tenant, ", ".join(key.scopes), Text(key.created))
    table_console().print(table)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name (disagg keys list).")],
    file: KeysPath = None,
    config: Config = None,
    settings_given: Set = None,
) -> None:
    """Remove a key: within seconds no router that reads the file takes it any more."""
    path = _path(file, config, settings_given)
    with _locked(path):
        known = _read(path)
        left = tuple(key for key in known if key.name != name)
        if len(left) == len(known):
            raise ConfigError(f"{path} has no key {name!r}", param="name")
        _write(path, _checked(left))
    print(f"{name} is revoked; {len(left)} keys are left in {path}", file=sys.stderr)


@app.command("create-hash-key")
def create_hash_key(
    path: Annotated[Path, typer.Argument(help="A new file, for cluster.hash_key_file.")],
) -> None:
    """Make the secret that names KV blocks, the same for all routers and workers of a cluster."""
    make_hash_key(path)
    print(f"{path} is for cluster.hash_key_file of all routers and workers", file=sys.stderr)


def _path(file: Path | None, config: Path | None, given: list[str] | None) -> Path:
    path = file or read_effective(config, given).settings.router.api_keys_file
    if not path:
        raise ConfigError("which file? (--file, or router.api_keys_file)", param="--file")
    try:
        return expanded(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="--file") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's folder, so that of two changes at once none is lost.

    Of a link that of its target, which others may change by its own name.
    """
    try:
        folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="--file") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _read(path: Path) -> tuple[KeyEntry, ...]:
    try:
        return parse_keys(read_given(path)[0]).keys
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="--file") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from None


def _checked(keys: tuple[KeyEntry, ...]) -> bytes:
    """What the file is to hold, or no router would take it."""
    data = KeyFile.model_construct(keys=keys).model_dump_json(indent=2).encode() + b"\n"
    parse_keys(data)
    return data


def _write(path: Path, data: bytes) -> None:
    """Replace the file as a whole: a router never reads half of it."""
    try:
        write_given(path, data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="--file") from error
