"""Transition tables as data: the code moves by them, the documentation is drawn from them.

Two rules hold for every table. A message that fits no row changes nothing; a move of our own
that fits no row is a bug of ours and raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from disagg.errors import InvariantViolation

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, E]):
    """In ``state``, on ``event``: do ``does``, then be in ``next`` (None: forgotten)."""

    state: S
    event: E
    next: S | None
    does: str


class TransitionTable(Generic[S, E]):
    """All moves of one kind of entry.

    Args:
        name: of the kind.
        rows: (state, event, next state or None, what is done).
        births: (event, state, what is done) of each way to begin; by default entries begin in
            the first row's state.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[tuple[S, E, S | None, str]],
        births: Sequence[tuple[E, S, str]] = (),
    ) -> None:
        self.name = name
        self.births = tuple(births)
        self.rows = tuple(Transition(*row) for row in rows)
        self._next = {(row.state, row.event): row.next for row in self.rows}
        if len(self._next) != len(self.rows):
            raise InvariantViolation(f"{name}: two rows for one state and event")

    def allows(self, state: S, event: E) -> bool:
        """Whether there is a row for ``event`` in ``state``."""
        return (state, event) in self._next

    def born(self, event: E) -> S:
        """The state of an entry that begins by ``event``."""
        (state,) = [state for birth, state, _ in self.births if birth == event]
        return state

    def move(self, state: S, event: E) -> S:
        """The state after ``event``.

        Raises:
            InvariantViolation: the table has no such row, or it forgets the entry.
        """
        after = self._row(state, event)
        if after is None:
            raise InvariantViolation(f"{self.name}: {event} forgets when {state}")
        return after

    def leave(self, state: S, event: E) -> None:
        """Check that ``event`` forgets the entry; raises `InvariantViolation` if not."""
        if self._row(state, event) is not None:
            raise InvariantViolation(f"{self.name}: {event} does not forget when {state}")

    def document(self) -> str:
        """Diagram (Mermaid) and table (Markdown) of all rows, as shown in ``docs/lease.md``."""
        labels: dict[tuple[str, str], list[str]] = {}
        for event, state, _ in self.births:
            labels.setdefault(("[*]", state), []).append(event)
        for row in self.rows:
            labels.setdefault((row.state, row.next or "[*]"), []).append(row.event)
        lines = ["```mermaid", "stateDiagram-v2"]
        if not self.births:
            lines.append(f"    [*] --> {self.rows[0].state}")
        lines += [f"    {a} --> {b} : {', '.join(events)}" for (a, b), events in labels.items()]
        lines += [
            "```",
            "",
            "| state | event | next | what is done |",
            "|---|---|---|---|",
        ]
        lines += [f"| (new) | {event} | {state} | {does} |" for event, state, does in self.births]
        lines += [
            f"| {row.state} | {row.event} | {row.next or '(forgotten)'} | {row.does} |"
            for row in self.rows
        ]
        return "\n".join(lines) + "\n"

    def _row(self, state: S, event: E) -> S | None:
        if not self.allows(state, event):
            raise InvariantViolation(f"{self.name}: {event} is impossible when {state}")
        return self._next[state, event]
