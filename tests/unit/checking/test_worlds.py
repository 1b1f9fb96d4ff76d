"""Everything that can happen in the named worlds."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from disagg.checking.__main__ import main
from disagg.checking.explorer.exploration import Exploration, Step
from disagg.checking.explorer.large_worlds import LARGE_WORLDS, WORLDS
from disagg.checking.explorer.small_worlds import SMALL_WORLDS
from disagg.checking.explorer.state import State
from disagg.checking.explorer.workers import Workers
from disagg.checking.explorer.world import World
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
from tests.unit.checking import checksum_mutants, waiting_mutants
from tests.unit.checking.num_states import NUM_STATES
from tests.unit.checking.taken_away import mutated

DOCUMENT = Path(__file__).parents[3] / "docs" / "worlds.md"


@dataclass
class Seen:
    """What was seen while a world was explored.

    Attributes:
        labels: of everything that can happen.
        rows: of the transition tables, as far as they were taken.
        strangers: messages that also came from a wrong epoch.
        memory_awaited: whether somebody ever waited for memory that it had lost.
    """

    exploration: Exploration
    labels: frozenset[str]
    rows: frozenset[tuple[str, str, str]]
    strangers: frozenset[type]
    memory_awaited: bool


@cache
def seen_in(name: str) -> Seen:
    """Explore a world, once for all tests."""
    labels, rows, strangers = set[str](), set[tuple[str, str, str]](), set[type]()
    steps, row, minds = World.steps, TransitionTable._row, Workers._minds

    def watch(self: World, now: State) -> Iterator[Step[State]]:
        for step in steps(self, now):
            labels.add(f"{step.label}, READs in progress" if now.reads else step.label)
            yield step

    def watch_row(self: TransitionTable[Any, Any], state: StrEnum, event: StrEnum) -> object:
        rows.add((self.name, state, event))
        return row(self, state, event)

    def watch_minds(self: Workers, number: int, other: Incarnation, message: PeerMessage) -> bool:
        strangers.add(type(message))
        return minds(self, number, other, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "steps", watch)
        patch.setattr(TransitionTable, "_row", watch_row)
        patch.setattr(Workers, "_minds", watch_minds)
        world = World(WORLDS[name][-1])
        exploration = world.explore()
    awaited = any(one.memory_awaited for one in world.moves.workers.facts)
    return Seen(exploration, frozenset(labels), frozenset(rows), frozenset(strangers), awaited)


@pytest.mark.parametrize("name", SMALL_WORLDS)
def test_no_promise_is_broken_and_every_hold_ends(name: str) -> None:
    seen = seen_in(name).exploration
    print(f"{name}: {seen}")
    assert not seen.problem, str(seen)
    assert seen.exhausted
    assert seen.num_states == NUM_STATES[name], "say so in num_states.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LARGE_WORLDS)
def test_the_large_worlds_too(name: str) -> None:
    seen = World(LARGE_WORLDS[name][-1]).explore()
    print(f"{name}: {seen}")
    assert not seen.problem, str(seen)
    assert seen.exhausted
    assert seen.num_states == NUM_STATES.get(name, seen.num_states), "say so in num_states.py"


def document() -> str:
    lines = ["| world | what may happen | states |", "|---|---|---|"]
    for name, (what, _) in WORLDS.items():
        full = " (full)" if name in LARGE_WORLDS else ""
        count = f"{NUM_STATES[name]:,}" if name in NUM_STATES else "not counted"
        lines.append(f"| `{name}`{full} | {what} | {count} |")
    return "\n".join(lines) + "\n"


def test_the_documents_table_is_this_one() -> None:
    check_drawn(DOCUMENT, "worlds", document())


# -- what the worlds reach --------------------------------------------------------------------


def test_every_row_of_the_tables_is_taken_but_those_an_honest_pair_never_takes() -> None:
    rows = {(t.name, r.state, r.event) for t in (LEASE_TABLE, INBOUND_TABLE) for r in t.rows}
    leases = ("lease", "lease-reader-restarts", "lease-owner-restarts")
    others = ("pair-errors", "pair-forgotten", "pair-strangers", "take-over", "chain-strangers")
    checksums = ("take-over-checksums",)
    taken = {row for name in (*leases, *others, *checksums) for row in seen_in(name).rows}
    # An honest reader sends no other Commit; to a sealed lease a stranger does.
    other = {("lease", state, LeaseEvent.COMMIT_OTHER) for state in ("OPEN", "COMMITTED")}
    # Time stands still here: nobody is shown that something goes on.
    shown = {row for row in rows if row[2] in (LeaseEvent.COMPUTED, LeaseEvent.READ_ON)}
    lease_and_inbound = {row for row in taken if row[0] in ("lease", "inbound")}
    assert lease_and_inbound == rows - other - shown


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("pair-preempt-cancel", "decode: hears Release(key=r1, number=1), READs in progress"),
        ("pair-preempt-cancel", "decode: hears Reserve(key=r1, number=2), READs in progress"),
        pytest.param(
            "pair-growing", "decode: READ 2 lands: 'KV of 4 5 6, begun'", marks=pytest.mark.slow
        ),
        ("pair-vanishes", "prefill vanishes, READs in progress"),
        ("pair-vanishes", "decode vanishes, READs in progress"),
        ("pair-vanishes", "decode: reservations expire"),
        ("pair-vanishes", "prefill: its leases expire"),
        ("pair-restart", "decode is back"),
        pytest.param("pair-limits", "decode: hears Reserve(key=s1", marks=pytest.mark.slow),
        ("mutual", "left: hears CommitAnswer(key=s1"),
        ("mutual", "right: hears CommitAnswer(key=r1"),
        ("mutual", "right: hears Ended(key=r1, reason=<EndReason.RESERVE_REFUSED"),
        pytest.param("mutual-growing", "left: hears Release(key=s1", marks=pytest.mark.slow),
        ("pair-checksums", "decode: READ 1 lands: 'flipped bits'"),
        ("pair-checksums", "prefill: hears Ended(key=r1, reason=<EndReason.READ_FAILED"),
        ("chain-checksums", "prefill: READ 1 lands: 'flipped bits'"),
        ("take-over-checksums", "second: READ 1 lands: 'flipped bits'"),
        ("lending-checksums", "prefill: READ 1 lands: 'flipped bits'"),
        (
            "lending-checksums",
            "prefill: hears LeaseLoading(key=r1, request_number=1, num_blocks=3)",
        ),
        ("generation-checksums", "decode: READ 1 brings flipped bits"),
        ("chain", "decode: hears CommitAnswer(key=r1"),
        ("chain", "prefill: hears CommitAnswer(key=r1"),
        ("chain-lost", "cache: hears WithdrawLease("),
        ("chain-strangers", "cache: hears from a stranger AskLease("),
        ("chain-two", "cache: hears WithdrawLease("),
        ("take-over", "second: hears CommitAnswer(key=r2"),
        ("take-over", "prefill: nobody took it over"),
        ("take-over-strangers", "prefill: hears from a stranger TakeOver("),
        ("quarantine", "decode: a request or READ times out, and exits"),
        ("tier", "one: a tier read ends"),
        ("tier", "one: tier read is damaged: 'bytes of another request'"),
        ("tier-eviction", "one: a tier read ends"),
        ("tier-reset", "one: its tier cannot be emptied"),
        ("tier-reset-writes", "one: tier write of block 4: 'old KV of 5'"),
        ("tier-reset", "one: tier read lands: 'old KV of 5'"),
        ("tier-resets", "one: hears ResetPrefixCache(number=2, router='')"),
        ("lending", "prefill: hears Offers(key=r1"),
        ("lending", "prefill: hears LeaseRefused(key=r1"),
        ("lending", "cache: hears WithdrawLease(key=r1"),
        ("lending-own", "cache: hears WithdrawLease(key=r1"),
        ("lending-lost", "cache: loses prefill"),
        ("lending-time-outs", "cache: its leases expire"),
        ("lending-strangers", "prefill: hears LeaseLoading(key=r1"),
        ("lending-reset", "cache: hears ResetPrefixCache(number=1, router=''), READs in progress"),
        ("generation-prefill-crash", "decode: hears Submit(r2, local, (5, 6, 12))"),
        ("generation-prefill-crash", "decode: hears Submit(r2, local, (5, 6))"),
        ("generation-decode-crash", "prefill: hears Submit(r2, local, (5, 6, 12, 13))"),
        ("generation-decode-crash", "router: hears of prefill PartEnded(key=r1"),
        ("generation-session", "decode: has a new session"),
        ("drain", "second: hears Submit(r2, takes over r1, (5, 6, 12, 13))"),
        ("drain", "second: hears Submit(r2, local, (5, 6))"),
        ("drain", "decode: its time to drain is over, and exits"),
        ("drain-session", "decode: has a new session"),
    ],
)
def test_the_worlds_reach_what_they_are_for(name: str, reached: str) -> None:
    """Control: an exhausted world in which nothing happens shows nothing."""
    assert any(label.startswith(reached) for label in seen_in(name).labels)


@pytest.mark.parametrize("name", ["pair-checksums", "chain-checksums", "take-over-checksums"])
def test_no_checksum_differs_where_no_bit_flips(name: str) -> None:
    mutants = {"inbound": checksum_mutants.ExpectsNoDifference}
    seen = World(mutated(name, mutants, bit_flips=0, cancels=0)).explore()
    assert not seen.problem, str(seen)
    seen = World(mutated(name, mutants, cancels=0)).explore()
    assert "differ" in seen.problem, "the control: it would be seen"


@pytest.mark.slow
def test_a_decode_waits_for_memory_where_decodes_grow_and_only_there() -> None:
    assert seen_in("mutual-growing").memory_awaited
    assert not seen_in("mutual").memory_awaited


def test_every_message_also_comes_from_a_wrong_epoch() -> None:
    worlds = ("pair-strangers", "chain-strangers", "take-over-strangers", "lending-strangers")
    kinds = frozenset[type]().union(*(seen_in(name).strangers for name in worlds))
    # Whoever asks is answered; the shell alone answers with WrongEpoch; the worlds' clock stands
    # still, so that nobody shows progress.
    assert kinds == {*get_args(PeerMessage)} - {AskLease, TakeOver, WrongEpoch, ReadProgress}


# -- more that is taken away ------------------------------------------------------------------


def test_a_row_of_the_table_taken_away_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ReservationState.GRANTED, ReservationEvent.RESERVE_NEWER
    rows = [(r.state, r.event, r.next, r.does) for r in RESERVATION_TABLE.rows]
    table = TransitionTable[Any, Any]("reservation", [r for r in rows if r[:2] != gone])
    monkeypatch.setattr(reservations, "RESERVATION_TABLE", table)
    seen = World(mutated("pair-preempt-cancel", cancels=0)).explore()
    assert "Reserve(higher n) is impossible when GRANTED" in seen.problem, str(seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_starved_by_as_many_as_come() -> None:
    """One overtakes, two overtake: nothing bounds it but the number of those that come."""
    mutants = {"admission": waiting_mutants.TakesReservationsAnyway}
    seen = World(mutated("mutual-older-more", mutants, starved_by=2)).explore()
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
