"""Everything that can happen to one lease."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest

from disagg.checking.explorer.exploration import Exploration, Step, explore
from disagg.checking.explorer.lease_world import LeaseWorld
from disagg.checking.explorer.worlds import LEASE_SETTINGS, World
from disagg.checking.explorer.worlds import WORLDS as NAMED
from disagg.transfer.owner.states import LEASE_TABLE, LeaseEvent
from disagg.transfer.reader.states import INBOUND_TABLE
from disagg.transfer.transitions import TransitionTable
from tests.unit.transfer.test_pair_explorer import exhaust

RANKS = [world for world in NAMED if world.name.startswith("lease-ranks")]
WORLDS = {
    name: setting for name, setting in LEASE_SETTINGS.items() if not name.startswith("lease-ranks")
}
NUM_STATES = {world.name: world.num_states for world in NAMED}

Explored = tuple[dict[str, Exploration], set[tuple[str, str, str]]]


@pytest.fixture(scope="module")
def explored() -> Explored:
    """What was seen in every world, and the rows of the tables that were taken."""
    taken: set[tuple[str, str, str]] = set()
    row = TransitionTable._row

    def watch(self: TransitionTable[Any, Any], state: StrEnum, event: StrEnum) -> object:
        taken.add((self.name, state, event))
        return row(self, state, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransitionTable, "_row", watch)
        return {name: LeaseWorld(setting).explore() for name, setting in WORLDS.items()}, taken


@pytest.mark.parametrize("name", WORLDS)
def test_no_wrong_bytes_no_overwriting_and_every_hold_ends(explored: Explored, name: str) -> None:
    seen = explored[0][name]
    print(f"{name}: {seen}")
    assert not seen.problem, str(seen)
    assert seen.exhausted
    assert seen.num_states == NUM_STATES[name], "say so in worlds.py"


@pytest.mark.parametrize("world", [w for w in RANKS if not w.only_full], ids=lambda w: w.name)
def test_several_ranks(world: World) -> None:
    exhaust(world)


def test_every_row_of_the_tables_is_taken_but_those_an_honest_pair_never_takes(
    explored: Explored,
) -> None:
    rows = {(t.name, r.state, r.event) for t in (LEASE_TABLE, INBOUND_TABLE) for r in t.rows}
    # An honest reader sends no other Commit; `end` moves as the time to live does.
    other = {("lease", state, "Commit, any other") for state in ("OPEN", "SEALED", "COMMITTED")}
    ended = {("lease", state, "end") for state in ("OPEN", "SEALED")}
    # What readers ask for is explored with whole workers.
    asked = {row for row in rows if row[0] == "lease" and "ORPHANED" in row[1]} | {
        ("lease", "SEALED", event) for event in ("WithdrawLease", "TakeOver", LeaseEvent.ORPHAN)
    }
    # Time stands still here: nobody is shown that something goes on.
    shown = {row for row in rows if row[2] in (LeaseEvent.COMPUTED, LeaseEvent.READ_ON)}
    assert explored[1] == rows - other - ended - asked - shown


def test_the_explorer_itself() -> None:
    def steps(n: int) -> Iterator[Step[int]]:
        yield Step("add", (n + 1) % 5, broken="four" if n == 3 else "")
        yield Step("double", n * 2 % 5)

    seen = explore(1, steps, states_max=10)
    assert (seen.problem, seen.trace) == ("four", ("add", "add", "add"))
    loop = explore(0, lambda n: [Step("step", (n + 1) % 5)], is_goal=lambda n: n == 2, states_max=9)
    assert (loop.exhausted, loop.num_states) == (True, 5)
    assert not explore(0, lambda n: [Step("step", n + 1)], states_max=9).exhausted
    trap = explore(
        0, lambda n: [Step("in", 7), Step("out", 0)], is_goal=lambda n: n == 0, states_max=9
    )
    assert not trap.problem
    trap = explore(
        0,
        lambda n: [Step("in", 7)] if n == 7 else [Step("in", 7), Step("out", 0)],
        is_goal=lambda n: n == 0,
        states_max=9,
    )
    assert trap.trace == ("in",)
