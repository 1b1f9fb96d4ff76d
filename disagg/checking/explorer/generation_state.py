"""The router, the workers and everything on its way between them at one moment."""

import re
from typing import NamedTuple

from disagg.checking.explorer.generation_setting import NAMES
from disagg.checking.explorer.generation_tokens import Prompts, Tokens
from disagg.checking.explorer.pair_memory import Memory
from disagg.messages.identity import Incarnation
from disagg.messages.session import Submit

ROLES = ("prefill", "decode")
_KEY = re.compile(r"RequestKey\(request_id='r', generation=(\d+)\)")
CRASHED = -1


class Read(NamedTuple):
    """A READ whose handle is not terminal."""

    side: int
    read_id: int
    owner: Incarnation
    src: int
    dst: int
    landed: bool


class Faults(NamedTuple):
    """How much has gone wrong so far."""

    crashes: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    read_errors: int = 0
    step_errors: int = 0
    evictions: int = 0
    time_outs: int = 0
    cancels: int = 0


class State(NamedTuple):
    """Everything that can differ between two moments."""

    router: int
    cores: tuple[int, ...]
    """`CRASHED`, or the worker's number."""
    lives: tuple[int, ...]
    memory: tuple[Memory, ...]
    up: tuple[tuple[int, ...], ...]
    """Per worker, what it has said to the router and the router has not heard."""
    down: tuple[tuple[int, ...], ...]
    prompts: Prompts
    received: Tokens = ()
    """By the client."""
    outcome: str = ""
    """How it ended for the client; nothing goes wrong after that."""
    on_way: tuple[int, ...] = ()
    """Sorted, or in order of sending."""
    reads: frozenset[Read] = frozenset()
    cut: tuple[int, ...] = ()
    """Workers without a session, though one side may not have noticed."""
    faults: Faults = Faults()


def life_of(side: int, number: int) -> Incarnation:
    """The n-th life of a worker."""
    return Incarnation(NAMES[side], f"{NAMES[side][0].upper()}{number}")


def shown(message: object) -> str:
    """In few words."""
    if isinstance(message, Submit):
        what = f"takes over {message.take_over}" if message.take_over else str(message.role)
        message = f"Submit({message.key}, {what}, {message.token_ids})"
    return _KEY.sub(r"r\1", str(message))
