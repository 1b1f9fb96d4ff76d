"""The parts of a chat message, as they come out of an answer's text."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for whoever asked."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str = field(repr=False)


Part = Content | Reasoning | CallStart | CallArguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts, neighbours of one kind joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case (Content(a), Content(b)):
                joined[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                joined[-1] = Reasoning(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                joined[-1] = CallArguments(i, a + b)
            case _:
                joined.append(part)
    return joined
