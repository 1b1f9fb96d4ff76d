"""`disagg scale`: more or fewer workers, or other roles, at the supervisor that runs."""

import time
from typing import Annotated

import typer
from rich.console import Console

from disagg.cluster.counts import COUNT_MAX, Counts, Fleet, Wish
from disagg.commands.arguments import Config, RayAddress, Set, read_effective
from disagg.commands.signals import exit_on_signals
from disagg.errors import ClusterTokenError, ConfigError, ExpiredError

_POLL_S = 0.5
_NOTICE_S = 30.0
"""A supervisor looks every two seconds at what is wanted."""

_ALONE = (
    ". The one that a disagg serve without --ray-address has started cannot be joined: end it and"
    " start it again with --prefill and --decode, or start Ray (ray start --head) and run disagg"
    " serve --ray-address auto beside it, which this command scales"
)

Count = Annotated[int | None, typer.Option(min=0, max=COUNT_MAX, show_default=False)]


def scale(
    config: Config = None,
    prefill: Count = None,
    decode: Count = None,
    both: Count = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Back to the settings, or to the automatic mode.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when all workers serve.")
    ] = True,
    ray_address: RayAddress = None,
    settings_given: Set = None,
) -> None:
    """Set how many workers there are, at the supervisor that runs; without counts show them.

    What is not named stays. A worker too many of one role takes another one that is missing, while
    it runs; else workers start, or drain and end. No request fails by it. The counts hold instead
    of those in the settings until --reset, for supervisors that come later too.

    The supervisor is that of the Ray cluster this machine belongs to, or of --ray-address. The
    cluster of a disagg serve of one machine alone cannot be joined.
    """
    exit_on_signals()
    named = {"prefill": prefill, "decode": decode, "both": both}
    given = {role: count for role, count in named.items() if count is not None}
    if reset and given:
        raise ConfigError("--reset: takes no counts beside it", param="--reset")
    settings = read_effective(config, settings_given, ray_address=ray_address).settings
    from disagg.cluster.ray_cluster import join_ray, stop_ray

    console = Console(highlight=False, soft_wrap=True)
    try:
        join_ray(settings.cluster.ray_address, settings.cluster.join_timeout_s)
    except ClusterTokenError as error:
        error.message += _ALONE
        raise
    try:
        from disagg.cluster.charge import is_supervised  # imports Ray
        from disagg.cluster.scale_record import read_fleet, write_wish

        fleet = read_fleet()
        if fleet is None:
            raise ExpiredError("no supervisor has run in this Ray cluster (disagg workers)")
        wish = None
        if given:
            wish = Wish(Counts(**(fleet.counts.by_role | given)), by_hand=True)
        if given or reset:
            write_wish(wish)
        if wait and (given or reset):
            fleet = _wait(wish, settings.cluster.start_timeout_s, console)
        else:
            fleet = read_fleet() or fleet
        console.print(fleet.describe(), markup=False)
        if not is_supervised():
            console.print("no supervisor runs (disagg workers): the last one left this")
    finally:
        stop_ray()


def _wait(wish: Wish | None, timeout_s: float, console: Console) -> Fleet:
    """Wait until the supervisor has what is wanted; its time begins anew whenever it goes on.

    Raises:
        ExpiredError: nothing has changed for too long.
    """
    from disagg.cluster.scale_record import read_fleet

    noticed_by_s = time.monotonic() + _NOTICE_S
    by_s = time.monotonic() + timeout_s
    last: Fleet | None = None
    while True:
        fleet = read_fleet()
        if fleet is not None and fleet.is_of(wish):
            if fleet != last:
                last, by_s = fleet, time.monotonic() + timeout_s
                if not fleet.is_complete:
                    console.print(fleet.describe(), markup=False)
            if fleet.is_complete:
                return fleet
        elif time.monotonic() > noticed_by_s:
            raise ExpiredError(
                f"no supervisor has taken it up after {_NOTICE_S:g} s; does disagg workers run?"
            )
        if time.monotonic() > by_s:
            raise ExpiredError(
                f"not all workers serve, and nothing has changed for {timeout_s:g} s:"
                " see the supervisor's log",
                param="cluster.start_timeout_s",
            )
        time.sleep(_POLL_S)
