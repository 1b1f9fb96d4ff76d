"""Everything that can happen between two whole workers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.fleet_world import FleetWorld
from disagg.checking.explorer.pair_setting import PairSetting
from disagg.checking.explorer.pair_worker import Workers
from disagg.checking.explorer.pair_world import PairWorld, State
from disagg.checking.explorer.worlds import FLEET_SETTINGS, PAIR_SETTINGS, WORLDS, World, document
from disagg.commands.explore import explore_worlds
from disagg.errors import ConfigError
from disagg.messages.identity import Incarnation
from disagg.messages.peer import AskLease, PeerMessage, TakeOver, WrongEpoch
from disagg.transfer.reservation import table as reservations
from disagg.transfer.reservation.states import (
    RESERVATION_TABLE,
    ReservationEvent,
    ReservationState,
)
from disagg.transfer.transitions import TransitionTable
from tests.drawn_tables import check_drawn

DOCUMENT = Path(__file__).parents[3] / "docs" / "lease.md"
QUICK = [world for world in WORLDS if not world.only_full and world.name.startswith("pair")]
FULL = [world for world in WORLDS if world.only_full]


def exhaust(world: World) -> None:
    said: list[str] = []
    assert explore_worlds(True, [world.name], said.append) == 0, "\n".join(said)
    print(said[0])
    assert f"{world.name}: {world.num_states:,} states," in said[0], "say so in worlds.py"
    assert "EXHAUSTED" in said[0]


@pytest.mark.parametrize("world", QUICK, ids=lambda world: world.name)
def test_no_wrong_token_and_every_hold_ends(world: World) -> None:
    exhaust(world)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", FULL, ids=lambda world: world.name)
def test_the_large_worlds_too(world: World) -> None:
    exhaust(world)


def test_the_documents_table_is_this_one() -> None:
    check_drawn(DOCUMENT, "worlds", document())


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("pair-preempt-cancel", "decode: hears Release(key=r, number=1), READs in progress"),
        ("pair-preempt-cancel", "decode: hears Reserve(key=r, number=2), READs in progress"),
        ("pair-growing", "READ 2 lands: 'KV 1, begun'"),
        ("pair-vanishes", "prefill vanishes, READs in progress"),
        ("pair-vanishes", "decode vanishes, READs in progress"),
        ("pair-vanishes", "decode: reservations expire"),
        ("pair-vanishes", "prefill: its leases expire"),
    ],
)
def test_the_worlds_reach_what_they_are_for(name: str, reached: str) -> None:
    """Control: an exhausted world in which nothing happens shows nothing."""
    assert any(label.startswith(reached) for label in labels(name))


@cache
def labels(name: str) -> set[str]:
    """Everything that can happen in a world."""
    world, seen = PairWorld(PAIR_SETTINGS[name]), set[str]()
    steps = world.steps

    def watched(now: State) -> Iterator[Step[State]]:
        for step in steps(now):
            seen.add(f"{step.label}, READs in progress" if now.reads else step.label)
            yield step

    world.steps = watched  # type: ignore[method-assign]
    world.explore()
    return seen


def test_every_message_also_comes_from_a_wrong_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[type] = set()
    minds = Workers.minds

    def watch(self: Workers, number: int, stranger: Incarnation, message: PeerMessage) -> bool:
        kinds.add(type(message))
        return minds(self, number, stranger, message)

    monkeypatch.setattr(Workers, "minds", watch)
    PairWorld(PAIR_SETTINGS["pair-strangers"]).explore()
    FleetWorld(FLEET_SETTINGS["chain-strangers"]).explore()
    # Whoever asks is answered, and the shell alone answers with WrongEpoch.
    assert kinds == {*get_args(PeerMessage)} - {AskLease, TakeOver, WrongEpoch}


def without_row(state: str, event: str) -> TransitionTable[Any, Any]:
    rows = [(r.state, r.event, r.next, r.does) for r in RESERVATION_TABLE.rows]
    return TransitionTable("reservation", [r for r in rows if (r[0], r[1]) != (state, event)])


def test_a_row_of_the_table_taken_away_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    state, event = ReservationState.GRANTED, ReservationEvent.RESERVE_NEWER
    monkeypatch.setattr(reservations, "RESERVATION_TABLE", without_row(state, event))
    seen = PairWorld(replace(PAIR_SETTINGS["pair-preempt-cancel"], cancels=0)).explore()
    print(seen)
    assert "Reserve(higher n) is impossible when GRANTED" in seen.problem, str(seen)


def test_what_is_frozen_thaws_alike_and_shares_what_is_shared() -> None:
    workers = PairWorld(PairSetting()).workers
    start = workers.start(Incarnation("prefill", "P0"))
    core = workers.thaw(start)
    assert core.leases.holds is core.kv.pool is core.inbound.holds
    assert workers.same(core, workers.thaw(start))
    core.kv.pool.hold("somebody", core.kv.pool.allocate(1))
    assert not workers.same(core, workers.thaw(start))


def test_unknown_worlds_are_named() -> None:
    with pytest.raises(ConfigError, match="no world 'nowhere'; there are lease, "):
        explore_worlds(False, ["nowhere"], print)
