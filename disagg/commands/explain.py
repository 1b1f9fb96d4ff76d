"""`disagg explain`: why a request went where it went, and how well that was foreseen."""

import json
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.commands.router_client import (
    DEFAULT_URL,
    TIMEOUT_S,
    Timeout,
    Url,
    as_router,
    call_router,
)
from disagg.commands.table_console import table_console
from disagg.errors import ConfigError

ID_HELP = "As the answer's x-request-id says it; with -0, -1, … behind it of several choices."
TENANT_HELP = "Whose request, with an admin's key; else the key's own tenant."


def explain(
    request_id: Annotated[str, typer.Argument(help=ID_HELP)],
    url: Url = DEFAULT_URL,
    tenant: Annotated[str, typer.Option("--tenant", help=TENANT_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout_s: Timeout = TIMEOUT_S,
) -> None:
    """Show the plans that were weighed for a request, their estimates, the choice, the outcome.

    The router that served it has its record for a while (router.records_max). Where the router has
    API keys, DISAGG_API_KEY has one of the request's tenant, or an admin's. The exit code is 2 when
    the router does not know the request.
    """
    if not request_id:
        raise ConfigError("which request? Its id is empty", param="request_id")
    query = f"?{urlencode({'tenant': tenant}, errors='replace')}" if tenant else ""
    # What is no text in this system's encoding is no request's id: the router will say so.
    path = f"/v1/disagg/requests/{quote(request_id, safe='', errors='replace')}{query}"
    record = call_router(url, path, timeout_s, scope="see this request", record=True)
    with as_router(url):
        shown = json.dumps(explanation(record), indent=2) if as_json else draw(record)
    if as_json:
        print(shown)
        return
    table_console().print(shown)


def explanation(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that says why, and what came of it."""
    plans = [
        {name: one[name] for name in ("reason", "estimate", "considered", "cause")}
        for one in record["generations"]
    ]
    return {
        "request_id": record["request_id"],
        "plans": plans,
        "refused": record.get("refused", []),
        "ttft_ms": measured_ttft_ms(record),
        "tpot_ms": measured_tpot_ms(record),
        "outcome": record["outcome"],
        "error": record["error"],
    }


def measured_ttft_ms(record: dict[str, Any]) -> int | None:
    """From the first plan to the first token; an estimate leaves out what was before the plan."""
    if record["first_token_ms"] is None or not record["generations"]:
        return None
    return int(record["first_token_ms"] - record["generations"][0]["started_ms"])


def measured_tpot_ms(record: dict[str, Any]) -> float | None:
    """Mean time per token after the first one."""
    first, end, num = record["first_token_ms"], record["finished_ms"], record["num_tokens"]
    return round((end - first) / (num - 1), 2) if first and end and num > 1 else None


def draw(record: dict[str, Any]) -> RenderableType:
    """Each plan's candidates as a table, and what was measured."""
    parts: list[RenderableType] = []
    for number, plan in enumerate(record["generations"], 1):
        parts += [Text(f"plan {number}: {plan['reason']}"), _candidates(plan["considered"])]
        if plan["cause"]:
            parts.append(Text(f"given up: {plan['cause']}", style="red"))
    if refused := record.get("refused"):  # a router of an earlier release says nothing of it
        parts += [Text("shed, as none of these would be in time:"), _candidates(refused)]
    elif not record["generations"]:
        parts.append(Text("it was never planned"))
    ttft, tpot = measured_ttft_ms(record), measured_tpot_ms(record)
    said = f"measured: TTFT {_shown(ttft)} ms after the plan, TPOT {_shown(tpot)} ms; "
    if ttft is None:
        said = ""
    parts.append(Text(f"{said}{record['outcome'] or 'it lives'} {record['error']}".rstrip()))
    return Group(*parts)


COLUMNS = ("", "prefill", "decode", "pull from", "found", "TTFT", "queue", "transfer", "prefill ms")
MORE = ("hand-over", "TPOT", "others", "moved", "SLOs missed")


def _candidates(considered: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, *MORE, box=None)
    for one in considered:
        found = one["estimate"]
        figures = ["not known"] + [""] * 7
        if found is not None:
            names = ("ttft_ms", "queue_ms", "transfer_ms", "prefill_ms", "handover_ms")
            figures = [_shown(found[name]) for name in (*names, "mean_tpot_ms", "others_ms")]
            figures.append(f"{found['num_bytes'] / 1024:.0f} KiB")
        table.add_row(
            "→" if one["chosen"] else "",
            Text(one["prefill"]),
            Text(one["decode"]),
            Text(one["pull"]),
            str(one["found_tokens"]),
            *figures,
            _shown(one["num_slos_missed"]) if found is not None else "",
        )
    return table


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.1f}"
