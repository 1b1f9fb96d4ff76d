"""Breadth-first exploration of everything that can happen in a small world.

The world is a start state and a function from a state to its possible steps. Steps that break a
promise say so; the first one found ends the exploration with the shortest trace. Where goals are
named, exhausted explorations also show that from every state that a goal concerns some way leads to
it ("every hold ends"), which is what fairness alone would need.
"""

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """One thing that can happen: its name, the state after it, and the promise it breaks."""

    label: str
    state: S
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was seen."""

    num_states: int
    num_steps: int
    exhausted: bool
    """Every reachable state was visited, and nothing is broken."""
    problem: str = ""
    trace: tuple[str, ...] = ()
    """Labels of the steps from the start to the problem."""
    num_to_lost: int = 0
    """After so many of them no goal can be reached any more; the others show how it ends."""

    def __str__(self) -> str:
        seen = f"{self.num_states} states, {self.num_steps} steps"
        if not self.problem:
            return f"{seen}, {'exhausted' if self.exhausted else 'NOT exhausted'}"
        lines = [f"{i:3}. {label}" for i, label in enumerate(self.trace, 1)]
        return "\n".join([f"{seen}: {self.problem}", *lines])


def _every_state(state: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Goal(Generic[S]):
    """States that must stay reachable: which they are, and from which others."""

    name: str
    is_reached: Callable[[S], bool]
    concerns: Callable[[S], bool] = _every_state


def explore(
    start: S,
    steps: Callable[[S], Iterable[Step[S]]],
    *,
    goals: Sequence[Goal[S]] = (),
    states_max: int,
) -> Exploration:
    """Visit every state reachable from ``start``, nearest first.

    Args:
        start: the first state; states are immutable and equal when they behave alike.
        steps: everything that can happen in a state.
        goals: what must stay reachable.
        states_max: bound on the states visited; beyond it the exploration is not exhausted.

    Returns:
        What was seen; the trace is a shortest one.
    """
    collects = gc.isenabled()
    gc.disable()  # Millions of live tuples, none of them in a circle: it would look in vain.
    try:
        return _explore(start, steps, goals, states_max)
    finally:
        if collects:
            gc.enable()


def _explore(
    start: S,
    steps: Callable[[S], Iterable[Step[S]]],
    goals: Sequence[Goal[S]],
    states_max: int,
) -> Exploration:
    seen = {start: 0}
    came: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]
    frontier = deque([(0, start)])
    num_steps = 0

    def trace(index: int) -> tuple[str, ...]:
        labels: list[str] = []
        while index > 0:
            index, label = came[index]
            labels.append(label)
        return tuple(reversed(labels))

    while frontier:
        here, state = frontier.popleft()
        for step in steps(state):
            num_steps += 1
            if step.broken:
                labels = (*trace(here), step.label)
                return Exploration(len(came), num_steps, False, step.broken, labels)
            there = seen.get(step.state)
            if there is None:
                if len(came) == states_max:
                    return Exploration(len(came), num_steps, False)
                there = seen[step.state] = len(came)
                came.append((here, step.label))
                before.append([])
                frontier.append((there, step.state))
            before[there].append(here)
    for goal in goals:
        reaches = _reaching(before, (n for state, n in seen.items() if goal.is_reached(state)))
        missing = (n for state, n in seen.items() if not reaches[n] and goal.concerns(state))
        lost = next(missing, None)  # `seen` is in the order of discovery: the nearest one.
        if lost is not None:
            at = next(state for state, index in seen.items() if index == lost)
            labels = (*trace(lost), *_to_dead_end(at, steps))
            problem = f"from here no way leads to a {goal.name}"
            return Exploration(len(came), num_steps, False, problem, labels, len(trace(lost)))
    return Exploration(len(came), num_steps, True)


def _to_dead_end(state: S, steps: Callable[[S], Iterable[Step[S]]]) -> tuple[str, ...]:
    """The shortest way on to a state that nothing leaves; empty where there is none."""
    came: dict[S, tuple[S, str] | None] = {state: None}
    frontier = deque([state])
    while frontier:
        here = frontier.popleft()
        after = [step for step in steps(here) if step.state != here]
        if not after:
            labels: list[str] = []
            while (link := came[here]) is not None:
                here, label = link
                labels.append(label)
            return tuple(reversed(labels))
        for step in after:
            if step.state not in came:
                came[step.state] = here, step.label
                frontier.append(step.state)
    return ()


def _reaching(before: list[list[int]], goals: Iterable[int]) -> bytearray:
    """From which states some goal can be reached."""
    reaches = bytearray(len(before))
    todo = list(goals)
    for goal in todo:
        reaches[goal] = 1
    while todo:
        for index in before[todo.pop()]:
            if not reaches[index]:
                reaches[index] = 1
                todo.append(index)
    return reaches
