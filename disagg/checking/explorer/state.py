"""The router, the workers and everything on its way between them at one moment."""

import re
from typing import NamedTuple

from disagg.checking.explorer.tokens import Tokens
from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage
from disagg.messages.session import Submit

CRASHED, VANISHED = -1, -2
STRANGER = "?"
_KEY = re.compile(r"RequestKey\(request_id='(\w+)', generation=(\d+)\)")


class Envelope(NamedTuple):
    """A message on its way between two workers."""

    sender: Incarnation
    to: Incarnation
    message: PeerMessage


class Read(NamedTuple):
    """A READ whose handle is not terminal."""

    side: int
    read_id: int
    owner: int
    owner_life: int
    src: int
    dst: int
    landed: bool


class Faults(NamedTuple):
    """How much has gone wrong so far."""

    cancels: tuple[int, ...] = ()
    losses: int = 0
    preemptions: int = 0
    evictions: int = 0
    step_errors: int = 0
    read_errors: int = 0
    time_outs: int = 0
    crashes: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
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
    clients: tuple[Client, ...] = ()
    cut: tuple[int, ...] = ()
    """Workers without a session, though one side may not have noticed."""
    waits: tuple[int, ...] = ()
    """Per worker, rounds until who was refused tries again."""
    faults: Faults = Faults()


def put(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    """The tuple with another value at one place."""
    return (*values[:index], value, *values[index + 1 :])


def shown(message: object) -> str:
    """In few words."""
    if isinstance(message, Submit):
        what = f"takes over {message.take_over}" if message.take_over else str(message.role)
        message = f"Submit({message.key}, {what}, {message.token_ids})"
    return _KEY.sub(r"\1\2", str(message))
