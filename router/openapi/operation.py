"""What a page takes and answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disagg.router.openai.body import UNSUPPORTED, Strict

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One page as a document describes it, equal to itself alone.

    Errors are not among ``answers``.
    """

    name: str
    summary: str
    answers: Mapping[int, Any]
    """By status: a type whose JSON it is, or `TEXT`, or `EVENTS`."""
    body: type[Strict] | None = None
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: UNSUPPORTED)
    """Fields of a body that it does not have, and the values of them that pass."""
    errors: frozenset[int] = frozenset()
    """Statuses of it that not every page has."""
    streams: bool = False
    """With ``stream: true`` the answer is events."""
    path_parameter: str = ""
    """What follows in the path of a page that is found by its beginning."""
    query: str = ""
    """The only parameter that the query may have."""
