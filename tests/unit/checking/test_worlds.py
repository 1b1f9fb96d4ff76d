"""Everything that can happen in the named worlds."""

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from disagg.checking.exhaust import exhaust, main
from disagg.checking.explorer.exploration import Exploration, Step
from disagg.checking.explorer.large_worlds import LARGE_WORLDS
from disagg.checking.explorer.lease_world import LeaseSetting
from disagg.checking.explorer.num_states import NUM_STATES
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.small_worlds import SMALL_WORLDS
from disagg.checking.explorer.state import State
from disagg.checking.explorer.workers import Workers
from disagg.checking.explorer.world import World
from disagg.checking.explorer.worlds import WORLDS, document, explore
from disagg.messages.identity import Incarnation
from disagg.messages.peer import AskLease, PeerMessage, ReadProgress, TakeOver, WrongEpoch
from disagg.transfer.owner.states import LEASE_TABLE, LeaseEvent
from disagg.transfer.reader.states import INBOUND_TABLE
from disagg.transfer.reservation import table as reservations
from disagg.transfer.reservation.states import (
    RESERVATION_TABLE,
    ReservationEvent,
    ReservationState,
)
from disagg.transfer.transitions import TransitionTable
from tests.drawn_tables import check_drawn
from tests.unit.checking import waiting_mutants
from tests.unit.checking.taken_away import mutated

DOCUMENT = Path(__file__).parents[3] / "docs" / "worlds.md"
LEASES = [name for name, (_, setting) in SMALL_WORLDS.items() if isinstance(setting, LeaseSetting)]


def check(name: str) -> None:
    said: list[str] = []
    assert exhaust(True, [name], said.append) == 0, "\n".join(said)
    print(said[0])
    if name in NUM_STATES:
        assert f"{name}: {NUM_STATES[name]:,} states," in said[0], "say so in num_states.py"
    assert "EXHAUSTED" in said[0]


@pytest.mark.parametrize("name", [name for name in SMALL_WORLDS if name not in LEASES])
def test_no_promise_is_broken_and_every_hold_ends(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LARGE_WORLDS)
def test_the_large_worlds_too(name: str) -> None:
    check(name)


def test_the_documents_table_is_this_one() -> None:
    check_drawn(DOCUMENT, "worlds", document())


# -- the lease's tables alone -----------------------------------------------------------------

Explored = tuple[dict[str, Exploration], set[tuple[str, str, str]]]


@pytest.fixture(scope="module")
def explored() -> Explored:
    """What was seen in every world of one lease, and the rows of the tables that were taken."""
    taken: set[tuple[str, str, str]] = set()
    row = TransitionTable._row

    def watch(self: TransitionTable[Any, Any], state: StrEnum, event: StrEnum) -> object:
        taken.add((self.name, state, event))
        return row(self, state, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransitionTable, "_row", watch)
        return {name: explore(WORLDS[name]) for name in LEASES}, taken


@pytest.mark.parametrize("name", LEASES)
def test_no_wrong_bytes_no_overwriting_and_every_hold_ends(explored: Explored, name: str) -> None:
    seen = explored[0][name]
    print(f"{name}: {seen}")
    assert not seen.problem, str(seen)
    assert seen.exhausted
    assert seen.num_states == NUM_STATES[name], "say so in num_states.py"


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


# -- what the worlds of whole workers reach ---------------------------------------------------


@cache
def labels(name: str) -> frozenset[str]:
    """Everything that can happen in a world."""
    setting = WORLDS[name]
    assert isinstance(setting, Setting)
    world, seen = World(setting), set[str]()
    steps = world.steps

    def watched(now: State) -> Iterator[Step[State]]:
        for step in steps(now):
            seen.add(f"{step.label}, READs in progress" if now.reads else step.label)
            yield step

    world.steps = watched  # type: ignore[method-assign]
    world.explore()
    return frozenset(seen)


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("pair-preempt-cancel", "decode: hears Release(key=r1, number=1), READs in progress"),
        ("pair-preempt-cancel", "decode: hears Reserve(key=r1, number=2), READs in progress"),
        ("pair-growing", "decode: READ 2 lands: 'KV of 4 5 6, begun'"),
        ("pair-vanishes", "prefill vanishes, READs in progress"),
        ("pair-vanishes", "decode vanishes, READs in progress"),
        ("pair-vanishes", "decode: reservations expire"),
        ("pair-vanishes", "prefill: its leases expire"),
        ("pair-restart", "decode is back"),
        ("pair-limits", "decode: hears Reserve(key=s1"),
        ("mutual", "left: hears CommitAnswer(key=s1"),
        ("mutual", "right: hears CommitAnswer(key=r1"),
        ("mutual", "right: hears Ended(key=r1, reason=<EndReason.RESERVE_REFUSED"),
        ("mutual-growing", "left: hears Release(key=s1"),
        ("chain", "decode: hears CommitAnswer(key=r1"),
        ("chain", "prefill: hears CommitAnswer(key=r1"),
        ("chain-lost", "cache: hears WithdrawLease("),
        ("chain-strangers", "cache: hears from a stranger AskLease("),
        ("chain-two", "cache: hears WithdrawLease("),
        ("take-over", "second: hears CommitAnswer(key=r2"),
        ("take-over", "prefill: nobody took it over"),
        ("take-over-strangers", "prefill: hears from a stranger TakeOver("),
        ("quarantine", "decode: a question or READ times out, and exits"),
        ("generation-prefill-crash", "decode: hears Submit(r2, local, (5, 6, 12))"),
        ("generation-prefill-crash", "decode: hears Submit(r2, local, (5, 6))"),
        ("generation-decode-crash", "prefill: hears Submit(r2, local, (5, 6, 12, 13))"),
        ("generation-decode-crash", "router: hears of prefill PartEnded(key=r1"),
        ("generation-session", "decode: has a new session"),
    ],
)
def test_the_worlds_reach_what_they_are_for(name: str, reached: str) -> None:
    """Control: an exhausted world in which nothing happens shows nothing."""
    assert any(label.startswith(reached) for label in labels(name))


def test_a_decode_waits_for_memory_where_decodes_grow_and_only_there() -> None:
    for name, waits in (("mutual-growing", True), ("mutual", False)):
        setting = WORLDS[name]
        assert isinstance(setting, Setting)
        world = World(setting)
        world.explore()
        assert any(one.memory_awaited for one in world.moves.workers.facts) == waits


def test_every_message_also_comes_from_a_wrong_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[type] = set()
    minds = Workers.minds

    def watch(self: Workers, number: int, stranger: Incarnation, message: PeerMessage) -> bool:
        kinds.add(type(message))
        return minds(self, number, stranger, message)

    monkeypatch.setattr(Workers, "minds", watch)
    for name in ("pair-strangers", "chain-strangers", "take-over-strangers"):
        explore(WORLDS[name])
    # Whoever asks is answered; the shell alone answers with WrongEpoch; the worlds' clock stands
    # still, so that nobody shows progress.
    assert kinds == {*get_args(PeerMessage)} - {AskLease, TakeOver, WrongEpoch, ReadProgress}


# -- more that is taken away ------------------------------------------------------------------


def test_a_row_of_the_table_taken_away_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ReservationState.GRANTED, ReservationEvent.RESERVE_NEWER
    rows = [(r.state, r.event, r.next, r.does) for r in RESERVATION_TABLE.rows]
    table = TransitionTable[Any, Any]("reservation", [r for r in rows if r[:2] != gone])
    monkeypatch.setattr(reservations, "RESERVATION_TABLE", table)
    seen = explore(mutated("pair-preempt-cancel", cancels=0))
    assert "Reserve(higher n) is impossible when GRANTED" in seen.problem, str(seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_starved_by_as_many_as_come() -> None:
    """One overtakes, two overtake: nothing bounds it but the number of those that come."""
    mutants = {"admission": waiting_mutants.TakesReservationsAnyway}
    seen = explore(mutated("mutual-older-more", mutants, starved_by=2))
    print(seen)
    assert "overtaken" in seen.problem


# -- the command ------------------------------------------------------------------------------


def test_unknown_worlds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--world", "nowhere"])
    assert "lease-retry" in capsys.readouterr().err


def test_a_world_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world", "chain", "--world", "pair-errors"]) == 0
    shown = capsys.readouterr()
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == ["chain", "pair-errors"]
    assert not shown.err, "no progress where nobody looks"
