"""`disagg status`: the fleet as a router and its workers know it."""

import json
from typing import Annotated

import typer

from disagg.commands.router_client import DEFAULT_URL, TIMEOUT_S, Timeout, Url
from disagg.commands.status_view import draw, fetch, is_well
from disagg.commands.table_console import table_console


def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout_s: Timeout = TIMEOUT_S,
) -> None:
    """Show workers with roles, epochs, versions and queues, pools per group, leases, transfers.

    It needs nothing but the admin port: the router asks the workers. Where the router has API keys,
    DISAGG_API_KEY has one that may observe.
    The exit code is 1 when the router is not ready, a role is missing or a worker does not answer,
    and 2 when no router does.
    """
    body = fetch(url, timeout_s)
    if as_json:
        print(json.dumps(body, indent=2))
    else:
        table_console().print(draw(body))
    raise typer.Exit(0 if is_well(body) else 1)
