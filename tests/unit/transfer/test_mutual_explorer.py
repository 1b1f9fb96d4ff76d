"""Two workers that prefill for each other come to rest; and what happens without a rule."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from disagg.checking.lockstep_world import LockstepWorld
from disagg.checking.mutual_world import MutualSetting, MutualWorld
from disagg.checking.worlds import MUTUAL_SETTINGS, WORLDS, World
from disagg.scheduling.worker_core import WorkerCore
from tests.unit.transfer import mutual_mutants as mutants
from tests.unit.transfer.pair_mutants import at
from tests.unit.transfer.test_pair_explorer import exhaust

NAMED = [w for w in WORLDS if w.name in MUTUAL_SETTINGS or w.name == "lockstep"]


@pytest.mark.parametrize("world", [w for w in NAMED if not w.only_full], ids=lambda w: w.name)
def test_nobody_waits_in_a_circle(world: World) -> None:
    exhaust(world)


def both(*mutations: Callable[[WorkerCore], None]) -> Callable[[WorkerCore], None]:
    def mutate(core: WorkerCore) -> None:
        for one in mutations:
            one(core)

    return mutate


MUTUAL, OLDER = MUTUAL_SETTINGS["mutual"], MUTUAL_SETTINGS["mutual-older"]
NO_WAY, STARVED = "no way leads to a goal", "overtaken"

MUTANTS: dict[str, tuple[MutualSetting, Callable[[WorkerCore], None], str]] = {
    "Reserve queued, not answered": (MUTUAL, at("", mutants.QueuesReserves), NO_WAY),
    "own blocks for the first chunk only": (
        # The share alone would keep the two apart.
        replace(MUTUAL, share=2.0),
        both(at("kv", mutants.PromisesOneToken), at("batcher", mutants.PrefillsWaitForBlocks)),
        NO_WAY,
    ),
    "refused, but keeps its blocks": (
        MUTUAL,
        both(at("outgoing", mutants.HoldsWhileItWaits), at("batcher", mutants.AsksAgain)),
        NO_WAY,
    ),
    "the reservation survives a preemption": (
        MUTUAL_SETTINGS["mutual-queue"],
        both(
            at("outgoing", mutants.KeepsReservations), at("parts", mutants.GoesOnUnderTheOldLease)
        ),
        NO_WAY,
    ),
    "reserved while an older request waits": (
        OLDER,
        at("", mutants.TakesReservationsAnyway),
        STARVED,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_taken_away_breaks(name: str) -> None:
    setting, mutate, what = MUTANTS[name]
    seen = MutualWorld(replace(setting, mutate=mutate)).explore()
    print(f"{name}: {seen}")
    assert what in seen.problem, str(seen)


def test_back_off_without_chance_goes_on_for_ever() -> None:
    seen = LockstepWorld(MUTUAL, delays=(1,)).explore()
    print(f"deterministic delay: {seen}")
    assert NO_WAY in seen.problem


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_starved_by_as_many_as_come() -> None:
    """One overtakes, two overtake: nothing bounds it but the number of those that come."""
    setting = replace(
        MUTUAL_SETTINGS["mutual-older-more"],
        starved_by=2,
        mutate=at("", mutants.TakesReservationsAnyway),
    )
    seen = MutualWorld(setting).explore()
    print(seen)
    assert STARVED in seen.problem


@pytest.mark.parametrize("name", ["mutual", "mutual-preempt", "mutual-growing"])
def test_the_worlds_reach_what_they_are_for(name: str) -> None:
    """Control: an exhausted world in which nothing happens shows nothing."""
    world, seen = MutualWorld(MUTUAL_SETTINGS[name]), set[str]()
    steps = world.steps

    def watched(now):  # type: ignore[no-untyped-def]
        found = list(steps(now))
        seen.update(step.label for step in found)
        return found

    world.steps = watched  # type: ignore[method-assign]
    world.explore()
    text = "\n".join(seen)
    for side, key in (("left", "s1"), ("right", "r1")):
        assert f"{side}: hears CommitAnswer(key={key}" in text
    assert "granted=False" in text
    assert ("is preempted" in text) == (name == "mutual-preempt")
    # Without being told to: a decode needed the block.
    assert ("hears Release(" in text) == (name != "mutual")
    waited = any(one.preempted_waiting for one in world.workers.numbers)
    assert waited == (name == "mutual-growing")
