"""A router and its workers as they run, for `disagg doctor`."""

from collections.abc import Iterator
from typing import Any

from disagg.commands.finding import Finding, fault, ok, warning
from disagg.commands.status_view import fetch
from disagg.errors import RemoteFault


def look_at_router(url: str, timeout_s: float) -> tuple[dict[str, Any] | None, list[Finding]]:
    """What a router tells; None, and what to do, where none does."""
    try:
        body = fetch(url, timeout_s)
    except RemoteFault as error:
        advice = "start one, or name its admin port with --url; DISAGG_API_KEY where it has keys"
        return None, [fault("router", error.message, advice)]
    return body, list(judge_fleet(body))


def judge_fleet(body: dict[str, Any]) -> Iterator[Finding]:
    """What is wrong with the fleet that a router tells of."""
    router = body["router"]
    who = f"{router['router_id']}, {router['version']}, serves {router['model']}"
    if router["status"] != "ok":
        yield warning("router", f"{who}: {router['status']}", "start another, or wait for its end")
    elif not router["ready"]:
        yield fault("router", f"{who}: not ready", "see the workers below and the router's log")
    else:
        yield ok("router", who)
    if router["missing"]:
        roles = ", ".join(router["missing"])
        advice = "look at the logs of these workers; disagg workers says why one has no place"
        yield fault("roles", f"no ready worker for {roles}", advice)
    for worker in body["workers"]:
        yield from _judge_worker(worker)
    versions = {one["version"] for one in body["workers"] if one["version"]} | {router["version"]}
    if len(versions) > 1:
        seen = f"{', '.join(sorted(versions))} side by side"
        yield warning("versions", seen, "right during an upgrade; else upgrade the rest")


def _judge_worker(worker: dict[str, Any]) -> Iterator[Finding]:
    name, pool = f"worker {worker['worker_id']}", worker["pool"]
    seen = f"{worker['role']} at {worker['address']}, {worker['state']}"
    if not worker["answered"]:
        advice = "it may be stopped or overloaded: see its log and host; the router drops it itself"
        yield fault(name, f"{seen}, no answer: {worker['error']}", advice)
    elif worker["state"] == "ready":
        yield ok(name, seen)
    else:
        advice = "wait; if it stays so, its log says what it waits for"
        yield warning(name, seen, advice)
    if pool["num_blocks_quarantined"]:
        seen = f"{pool['num_blocks_quarantined']} blocks in quarantine: READs that do not end"
        advice = "check the network to the owners that disagg leases names; it drains by itself"
        yield warning(name, seen, advice)
