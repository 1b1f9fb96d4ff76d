"""Everything that can happen to prefix pulls and take-overs; and what breaks without a rule."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from disagg.checking.explorer import Step
from disagg.checking.fleet_setting import FleetSetting
from disagg.checking.fleet_world import FleetWorld, State
from disagg.checking.worlds import FLEET_SETTINGS, WORLDS, World
from tests.unit.transfer import fleet_mutants, mutants, pair_mutants
from tests.unit.transfer.pair_mutants import at
from tests.unit.transfer.test_pair_explorer import exhaust

NAMED = [world for world in WORLDS if world.name in FLEET_SETTINGS]


@pytest.mark.parametrize("world", [w for w in NAMED if not w.only_full], ids=lambda w: w.name)
def test_no_wrong_token_and_every_hold_ends(world: World) -> None:
    exhaust(world)


CHAIN, TAKE_OVER = FLEET_SETTINGS["chain"], FLEET_SETTINGS["take-over"]
LOST = FLEET_SETTINGS["chain-lost"]
EXPIRES = replace(CHAIN, lease_time_outs=True)
ASKS_AGAIN = replace(CHAIN, repeats=True)
BELIEVES = "the cache offers 'bytes of another request'"
NO_WAY = "no way leads to a goal"

MUTANTS: dict[str, tuple[FleetSetting, Callable[..., None], str]] = {
    "matched and held in two calls": (
        ASKS_AGAIN,
        at("outgoing", fleet_mutants.MatchesThenHolds),
        BELIEVES,
    ),
    "a pull's lease holds nothing": (CHAIN, at("leases", mutants.OfferWithoutHold), BELIEVES),
    "an unknown lease says OK": (EXPIRES, at("leases", mutants.UnknownLeaseSaysOk), BELIEVES),
    "valid before the commit": (
        EXPIRES,
        at("inbound", pair_mutants.ValidBeforeCommit),
        BELIEVES,
    ),
    "published before the commit": (
        CHAIN,
        at("prefixes", fleet_mutants.PublishedBeforeCommit),
        "the cache offers",
    ),
    "destinations dropped when a pull is given up": (
        LOST,
        at("inbound", mutants.DestinationsDroppedAtAbort),
        "held by no transfer",
    ),
    "a given-up pull keeps its blocks": (
        LOST,
        at("prefixes", fleet_mutants.FailsTheGeneration),
        "",
    ),
    "never withdrawn": (
        replace(CHAIN, evictions=0, cancels=1),
        at("parts._asker", fleet_mutants.NeverWithdraws),
        NO_WAY,
    ),
    "transferred in two steps": (
        replace(TAKE_OVER, repeats=True),
        at("outgoing.asked", fleet_mutants.TransfersInTwoSteps),
        BELIEVES,
    ),
    "an orphan holds nothing": (
        TAKE_OVER,
        at("leases", fleet_mutants.OrphansAreDropped),
        BELIEVES,
    ),
}


def committed_is_transferred(core: object) -> None:
    at("leases", fleet_mutants.CommittedAreTransferred)(core)  # type: ignore[arg-type]
    at("outgoing.asked", fleet_mutants.TransfersCommitted)(core)  # type: ignore[arg-type]


MUTANTS["a committed lease is taken over"] = (TAKE_OVER, committed_is_transferred, BELIEVES)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_taken_away_breaks(name: str) -> None:
    setting, mutate, what = MUTANTS[name]
    seen = FleetWorld(replace(setting, mutate=mutate)).explore()
    print(f"{name}: {seen}")
    assert seen.problem, str(seen)
    assert what in seen.problem, str(seen)


@pytest.mark.parametrize(
    ("setting", "reached"),
    [
        (CHAIN, "decode: hears CommitAnswer(key=r1"),
        (CHAIN, "prefill: hears CommitAnswer(key=r1"),
        (TAKE_OVER, "second: hears CommitAnswer(key=r2"),
        (TAKE_OVER, "prefill: nobody took it over"),
        (LOST, "cache: hears Withdraw("),
    ],
)
def test_the_worlds_reach_what_they_are_for(setting: FleetSetting, reached: str) -> None:
    """Control: an exhausted world in which nothing happens shows nothing."""
    world, seen = FleetWorld(setting), set[str]()
    steps = world.steps

    def watched(now: State) -> list[Step[State]]:
        found = list(steps(now))
        seen.update(step.label for step in found)
        return found

    world.steps = watched  # type: ignore[assignment, method-assign]
    world.explore()
    assert any(label.startswith(reached) for label in seen)
