"""Everything that can happen between two whole workers; and what breaks without a rule."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.checking.pair_setting import PairSetting
from disagg.checking.pair_world import PairWorld
from disagg.checking.worlds import PAIR_SETTINGS, WORLDS, World, document
from disagg.cluster.explore import explore_worlds
from disagg.errors import ConfigError
from disagg.transfer import reservations
from disagg.transfer.identity import Incarnation
from disagg.transfer.reservation_states import (
    RESERVATION_TABLE,
    ReservationEvent,
    ReservationState,
)
from disagg.transfer.transitions import TransitionTable
from tests.unit.transfer import mutants, pair_mutants
from tests.unit.transfer.pair_mutants import at

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
    table = f"<!-- drawn: worlds -->\n{document()}<!-- end -->"
    assert table in DOCUMENT.read_text(), f"docs/lease.md should contain:\n{table}"


def without_row(state: str, event: str) -> TransitionTable[Any, Any]:
    rows = [(r.state, r.event, r.next, r.does) for r in RESERVATION_TABLE.rows]
    return TransitionTable("reservation", [r for r in rows if (r[0], r[1]) != (state, event)])


CANCEL, PREEMPT = PAIR_SETTINGS["pair-cancel"], PAIR_SETTINGS["pair-preempt-cancel"]
ONLY_PREEMPT = replace(PREEMPT, cancels=0)
TIMES_OUT, ERRORS = PAIR_SETTINGS["pair-time-outs"], PAIR_SETTINGS["pair-errors"]
EVICT = replace(CANCEL, cancels=0, evictions=1)
SHARED, STRANGERS = PAIR_SETTINGS["pair-shared"], PAIR_SETTINGS["pair-strangers"]
NO_WAY, LANDS = "no way leads to a goal", "held by no transfer"
BELIEVES = "the cache offers 'bytes of another request'"

MUTANTS: dict[str, tuple[PairSetting, Callable[..., None] | None, str]] = {
    "steps are no holders": (CANCEL, at("kv._steps", pair_mutants.StepsHoldNothing), "overwrites"),
    "published at launch": (CANCEL, at("", pair_mutants.PublishesAtLaunch), "the cache offers"),
    "offered at launch": (CANCEL, at("", pair_mutants.OffersAtLaunch), "'half-written'"),
    "offered without a hold": (EVICT, at("leases", mutants.OfferWithoutHold), BELIEVES),
    "a shared block offered without a hold": (
        replace(SHARED, num_blocks=7, evictions=1),
        at("leases", mutants.OfferWithoutHold),
        BELIEVES,
    ),
    "the lease outlives a preemption": (
        ONLY_PREEMPT,
        at("outgoing", pair_mutants.LeaseOutlivesPreemption),
        "has a live lease already",
    ),
    "destinations dropped at Release": (
        ONLY_PREEMPT,
        at("inbound", mutants.DestinationsDroppedAtAbort),
        LANDS,
    ),
    "questions not numbered": (
        ONLY_PREEMPT,
        at("outgoing._asker", pair_mutants.UnnumberedQuestions),
        NO_WAY,
    ),
    "generations not submitted are reserved": (
        CANCEL,
        at("incoming", pair_mutants.AnyGenerationReserved),
        "",
    ),
    "valid before the commit": (
        replace(EVICT, cancels=1),
        at("inbound", pair_mutants.ValidBeforeCommit),
        BELIEVES,
    ),
    "published before the commit": (
        CANCEL,
        at("incoming", pair_mutants.PublishedBeforeCommit),
        "the cache offers",
    ),
    "Release after the seal": (
        replace(TIMES_OUT, passes_max=0),
        at("outgoing", pair_mutants.ReleasesAfterTheSeal),
        NO_WAY,
    ),
    "a repeated yes is released": (
        PAIR_SETTINGS["pair"],
        at("outgoing", pair_mutants.ReleasesLateAnswers),
        NO_WAY,
    ),
    "anyone ends a lease": (
        STRANGERS,
        at("outgoing", pair_mutants.AnyoneEndsLeases),
        "stranger's message did something",
    ),
    "a cancel overtakes its submit": (replace(CANCEL, cancel_overtakes=True), None, NO_WAY),
    "the router does not echo ends": (replace(ERRORS, echoes=False), None, NO_WAY),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_taken_away_breaks(name: str) -> None:
    setting, mutate, what = MUTANTS[name]
    if mutate is not None:
        setting = replace(setting, mutate=mutate)
    seen = PairWorld(setting).explore()
    print(f"{name}: {seen}")
    assert seen.problem, str(seen)
    assert what in seen.problem, str(seen)
    assert str(seen).count("\n") == len(seen.trace) > 0, "one readable line per step"


def test_a_row_of_the_table_taken_away_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    state, event = ReservationState.GRANTED, ReservationEvent.RESERVE_NEWER
    monkeypatch.setattr(reservations, "RESERVATION_TABLE", without_row(state, event))
    seen = PairWorld(ONLY_PREEMPT).explore()
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
