"""`disagg drain`: a worker, or all workers of a host, take no new work."""

import time
from typing import Annotated, Any

import typer

from disagg.commands.router_client import DEFAULT_URL, TIMEOUT_S, Url, as_router, call_router
from disagg.errors import RemoteFault

PATH, WORKERS = "/v1/disagg/drain", "/v1/disagg/workers"
POLL_S = 0.2
GONE_S = 15.0
"""Who is away from the router for so long has ended: a worker whose session broke, or whose router
is a new one, registers again sooner (after 10 s at the latest), and may still serve others."""
GRACE_S = 15.0 + GONE_S
"""The router hears of an end a moment after it; of one whose process hangs when it is silent."""
DEADLINE_MS = 30_000
_GOES_ON = ("num_running", "num_waiting", "num_reservations", "num_leases", "num_inbound")


def drain(
    name: Annotated[
        str, typer.Argument(metavar="WORKER|HOST", help="A worker's id, or the host it serves at.")
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing goes on there.")] = False,
    deadline_ms: Annotated[
        int,
        typer.Option(
            "--deadline", min=0, metavar="MS", help="After which nothing goes on any more."
        ),
    ] = DEADLINE_MS,
    undo: Annotated[bool, typer.Option("--undo", help="A host takes work again.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Free a worker, or a host, of work without losing a request.

    No router gives it new work. What runs there may end until the last quarter of the deadline (ten
    seconds at most); what is left then moves to other workers, with its KV. A worker ends then, and
    whoever supervises it starts its next life. The workers of a host stay, without work, until
    they are ended or the drain is undone: so the host may be taken away.

    It needs the admin port of one router, and where it has API keys, DISAGG_API_KEY with one that
    may administer. With --wait the exit code is 1 where something still goes on after the deadline.
    """
    body = {"name": name, "timeout_ms": deadline_ms, "undo": undo}
    told = call_router(url, PATH, TIMEOUT_S, scope="administer", put=body)
    with as_router(url):
        names = ", ".join(worker["worker_id"] for worker in told["workers"])
        ends = told["ends"]
    if undo:
        print(f"{names} take work again" if "," in names else f"{names} takes work again")
        return
    after = "end then" if ends else "stay then, without work"
    print(f"draining {names}, within {deadline_ms / 1000:g} s; they {after}", flush=True)
    if wait and not _wait(url, told, deadline_ms / 1000 + GRACE_S):
        raise typer.Exit(1)


def _wait(url: str, told: dict[str, Any], bound_s: float) -> bool:
    """Show how far it is until nothing goes on; False when that took too long."""
    until_s, shown, gone_s = time.monotonic() + bound_s, dict[str, str](), dict[str, float]()
    names = [worker["worker_id"] for worker in told["workers"]]
    while True:
        try:
            states = _look(url, told, gone_s)
        except RemoteFault as error:  # the router may be back in time, or busy for a moment
            gone_s.clear()  # it may be a new one, which has to be found first
            states = dict.fromkeys(names, error.message)
        for name, state in states.items():
            if state != shown.get(name):
                print(f"{name}: {state or 'done'}", flush=True)
        shown = states
        if not (left := [name for name, state in states.items() if state]):
            return True
        if time.monotonic() > until_s:
            print(f"not free after {bound_s:g} s: {', '.join(left)}")
            return False
        time.sleep(POLL_S)


def _look(url: str, told: dict[str, Any], gone_s: dict[str, float]) -> dict[str, str]:
    """What each worker does; ``gone_s`` has since when the router does not know it, by its id."""
    with as_router(url):
        known = call_router(url, WORKERS, TIMEOUT_S, scope="observe")["workers"]
    states = {}
    for worker in told["workers"]:
        name, now_s = worker["worker_id"], time.monotonic()
        state = state_of(worker, known, ends=told["ends"])
        if state is not None:
            gone_s.pop(name, None)
        elif now_s - gone_s.setdefault(name, now_s) < GONE_S:
            state = "is away"
        states[name] = state or ""
    return states


def state_of(worker: dict[str, str], known: list[dict[str, Any]], *, ends: bool) -> str | None:
    """What a worker that drains still does, as the router knows it.

    Returns:
        "" when it is free, or the router has its next life, which it takes once this one has left;
        None when it knows neither.
    """
    try:
        lives = {one["info"]["incarnation"]["worker_id"]: one for one in known}
        view = lives.get(worker["worker_id"])
        if view is None:
            return None
        if view["info"]["incarnation"] != worker:
            return ""
        stats = view["stats"] or {}
        if not stats.get("draining"):
            return "has not begun"
        going_on = [
            f"{stats[name]} {name.removeprefix('num_')}" for name in _GOES_ON if stats[name]
        ]
        if view["num_live"] and not stats["num_running"]:
            going_on.append(f"{view['num_live']} requests of this router")
    except (KeyError, TypeError) as error:
        raise RemoteFault(f"the router answered something else: {error!r}") from error
    return ", ".join(going_on) or ("ends" if ends else "")
