"""`disagg revisions`: what is served side by side, and each one's part of the new requests."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from disagg.commands.router_client import DEFAULT_URL, TIMEOUT_S, as_router, call_router
from disagg.commands.table_console import table_console
from disagg.errors import DisaggError, RemoteFault
from disagg.routing.revisions import parse_revision_weights

PATH = "/v1/disagg/revisions"

app = typer.Typer(
    no_args_is_help=True,
    help="Revisions of the model side by side: see them, and move traffic between them.",
)
Routers = Annotated[
    list[str] | None,
    typer.Option("--url", help="HTTP address of a router's admin port; several times for all."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_revisions(routers: Routers = None, as_json: AsJson = False) -> None:
    """Show the revisions that have workers or a weight, at each router."""
    urls = routers or [DEFAULT_URL]
    told = {url: call_router(url, PATH, TIMEOUT_S, scope="observe") for url in urls}
    _show(told, as_json=as_json)


@app.command("set")
def set_weights(
    weights: Annotated[
        list[str], typer.Argument(metavar="NAME=WEIGHT...", help="0: no new requests.")
    ],
    routers: Routers = None,
    as_json: AsJson = False,
) -> None:
    """Share new requests so from now on, in place of all weights there were.

    Who is not named gets none. A router that starts again goes by router.revision_weights.
    """
    body = {"weights": parse_revision_weights(weights)}
    urls = routers or [DEFAULT_URL]
    told: dict[str, dict[str, Any]] = {}
    for url in urls:
        try:
            told[url] = call_router(url, PATH, TIMEOUT_S, scope="administer", put=body)
        except DisaggError as error:
            if not told:
                raise
            done = ", ".join(told)
            raise RemoteFault(
                f"{error.message}; set at {done} alone: say it to all again"
            ) from error
    _show(told, as_json=as_json)


def draw(revisions: list[dict[str, Any]]) -> Table:
    """One router's table."""
    names = ("revision", "weight", "ready", "running", "waiting", "requests", "longest", "model")
    table = Table(*names, box=None)
    for one in revisions:
        fingerprint = str(one["model_fingerprint"] or "no worker")[:12]
        cells = (
            one["name"],
            f"{one['weight']:g}",
            f"{one['num_workers_ready']}/{one['num_workers']}",
            one["num_running"],
            one["num_waiting"],
            one["num_requests"],
            one["max_model_tokens"] or "-",
            fingerprint,
        )
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _show(told: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"routers": told}, indent=2))
        return
    console = table_console()
    for url, one in told.items():
        with as_router(url):
            table = draw(one["revisions"])
        if len(told) > 1:
            console.print(Text(url, style="bold"))
        console.print(table)
