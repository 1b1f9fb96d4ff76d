"""Two workers that prefill for each other come to rest."""

from dataclasses import replace

import pytest

from disagg.checking.explorer.mutual_world import MutualWorld
from disagg.checking.explorer.worlds import MUTUAL_SETTINGS, WORLDS, World
from tests.unit.transfer import mutual_mutants as mutants
from tests.unit.transfer.taken_away import at
from tests.unit.transfer.test_pair_explorer import exhaust

NAMED = [w for w in WORLDS if w.name in MUTUAL_SETTINGS or w.name == "lockstep"]


@pytest.mark.parametrize("world", [w for w in NAMED if not w.only_full], ids=lambda w: w.name)
def test_nobody_waits_in_a_circle(world: World) -> None:
    exhaust(world)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_starved_by_as_many_as_come() -> None:
    """One overtakes, two overtake: nothing bounds it but the number of those that come."""
    setting = replace(
        MUTUAL_SETTINGS["mutual-older-more"],
        starved_by=2,
        mutate=at("admission", mutants.TakesReservationsAnyway),
    )
    seen = MutualWorld(setting).explore()
    print(seen)
    assert "overtaken" in seen.problem


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
