"""What is on its way between two workers, as parts of a world's state."""

from typing import Any, NamedTuple

from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage


class Envelope(NamedTuple):
    """A message on its way."""

    sender: Incarnation
    to: Incarnation
    message: PeerMessage


class Read(NamedTuple):
    """A READ whose handle is not terminal."""

    read_id: int
    owner: Incarnation
    src: int
    dst: int
    landed: bool


def put(values: Any, index: int, value: object) -> Any:
    """The tuple with another value at one place."""
    return (*values[:index], value, *values[index + 1 :])
