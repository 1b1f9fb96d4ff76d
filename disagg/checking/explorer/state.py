"""The router, the workers and everything on its way between them at one moment."""

import re
from functools import cache
from typing import NamedTuple

from disagg.checking.explorer.memory import Running
from disagg.checking.explorer.tokens import Tokens
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import PeerMessage
from disagg.messages.submit import Submit
from disagg.scheduling.actions import TierKey

CRASHED, VANISHED = -1, -2
STRANGER = "?"
ASK_TIMEOUT_MS, TAKE_OVER_MS, LEASE_TTL_MS, RESERVATION_TTL_MS = 10, 15, 20, 30
"""Everything else happens at 0 ms, so that each of them can come first."""
GIVE_UP_MS, DRAIN_MS = 3, 4
"""When a worker that was asked to end moves what goes on; when its time is over."""
_KEY = re.compile(r"RequestKey\(request_id='(\w+)', generation=(\d+), router='(\w*)'\)")


class Facts(NamedTuple):
    """What a world needs to know of a worker."""

    me: Incarnation
    keys: tuple[RequestKey, ...]
    """Generations it works on."""
    num_leases: int
    held: frozenset[int]
    cached: tuple[tuple[str, int], ...]
    """(content, block) of everything the prefix cache offers."""
    inbound_held: frozenset[int]
    """Blocks that READs may write."""
    at_rest: bool
    """Nothing is held and nothing goes on."""
    holds_nothing: bool
    """No block, promise, lease or reservation; somebody may wait."""
    repeats: bool
    reading: bool
    running: Running | None = None
    queued: tuple[Running, ...] = ()
    """Steps that were launched and wait for the one that runs."""
    lending: bool = False
    """Other workers wait for what its tier brings."""
    orphans: bool = False
    """Leases that wait for another reader."""
    asking: bool = False
    granted: bool = False
    backing_off: bool = False
    preemptible: bool = False
    """A prefill that is leased runs."""
    memory_awaited: bool = False
    """Somebody who lost its memory waits for it."""
    has_passes: bool = True
    """Nobody has used up more than half of its refusals."""
    computed: tuple[tuple[int, str], ...] = ()
    """(block, content) of a prefill that takes no steps."""
    own_moves: tuple[str, ...] = ()
    """Of a worker that nobody gives orders."""


class Envelope(NamedTuple):
    """A message on its way between two workers."""

    sender: Incarnation
    to: Incarnation
    message: PeerMessage


class Read(NamedTuple):
    """A READ of which some handles are not terminal; every rank has one."""

    side: int
    read_id: int
    owner: int
    owner_life: int
    src: int
    dst: int
    landed: tuple[bool, ...]
    ended: tuple[bool, ...]
    error: str = ""
    reported: bool = False


class TierCopy(NamedTuple):
    """A copy of one block to or from a worker's tier."""

    side: int
    copy_id: int
    writes: bool
    key: TierKey
    block: int
    content: str = ""
    """What was copied; empty before that."""


class BlockSum(NamedTuple):
    """A checksum of one block that is being computed."""

    side: int
    request_id: int
    block: int


class Faults(NamedTuple):
    """How much has gone wrong so far."""

    cancels: tuple[int, ...] = ()
    losses: int = 0
    preemptions: int = 0
    evictions: int = 0
    step_errors: int = 0
    read_errors: int = 0
    bit_flips: int = 0
    tier_losses: int = 0
    resets: int = 0
    clear_errors: int = 0
    time_outs: int = 0
    crashes: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    drains: tuple[int, ...] = ()
    """Workers that were asked to end."""
    stalls: int = 0
    stalled: tuple[int, ...] = ()
    """Workers whose last report says that their step does not end."""
    routers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Routers that have vanished, each with the workers that have noticed."""
    stranger: tuple[int, str] = (-1, "")
    """Whom a stranger has asked for leases, until it is lost; as whose other life it came."""


class Client(NamedTuple):
    """What somebody got who asked the router's core."""

    received: Tokens = ()
    outcome: str = ""
    """How it ended."""


class State(NamedTuple):
    """Everything that can differ between two moments."""

    router: int
    workers: tuple[int, ...]
    """The worker's number, or `CRASHED` or `VANISHED`."""
    lives: tuple[int, ...]
    up: tuple[tuple[int, ...], ...]
    """Per worker, what it has said to the router's core and that has not heard."""
    down: tuple[tuple[int, ...], ...]
    on_way: tuple[int, ...] = ()
    """Sorted, or in order of sending."""
    reads: tuple[Read, ...] = ()
    sums: tuple[BlockSum, ...] = ()
    copies: tuple[TierCopy, ...] = ()
    stores: tuple[tuple[tuple[TierKey, str], ...], ...] = ()
    """Per worker, what its tier has."""
    clears: tuple[int, ...] = ()
    """Workers whose tier is about to be emptied."""
    clients: tuple[Client, ...] = ()
    cut: tuple[int, ...] = ()
    """Workers without a session, though one side may not have noticed."""
    waits: tuple[int, ...] = ()
    """Per worker, rounds until who was refused tries again."""
    faults: Faults = Faults()


def put(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    """The tuple with another value at one place."""
    return (*values[:index], value, *values[index + 1 :])


@cache
def shown(message: object) -> str:
    """In few words."""
    if isinstance(message, Submit):
        what = f"takes over {message.take_over}" if message.take_over else str(message.role)
        message = f"Submit({message.key}, {what}, {message.token_ids})"
    return _KEY.sub(r"\3\1\2", str(message))
