"""Everything that can happen to prefix pulls and take-overs."""

import pytest

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.fleet_setting import FleetSetting
from disagg.checking.explorer.fleet_world import FleetWorld, State
from disagg.checking.explorer.worlds import FLEET_SETTINGS, WORLDS, World
from tests.unit.transfer.test_pair_explorer import exhaust

NAMED = [world for world in WORLDS if world.name in FLEET_SETTINGS]


@pytest.mark.parametrize("world", [w for w in NAMED if not w.only_full], ids=lambda w: w.name)
def test_no_wrong_token_and_every_hold_ends(world: World) -> None:
    exhaust(world)


CHAIN, TAKE_OVER = FLEET_SETTINGS["chain"], FLEET_SETTINGS["take-over"]
LOST = FLEET_SETTINGS["chain-lost"]


@pytest.mark.parametrize(
    ("setting", "reached"),
    [
        (CHAIN, "decode: hears CommitAnswer(key=r1"),
        (CHAIN, "prefill: hears CommitAnswer(key=r1"),
        (TAKE_OVER, "second: hears CommitAnswer(key=r2"),
        (TAKE_OVER, "prefill: nobody took it over"),
        (LOST, "cache: hears WithdrawLease("),
        (FLEET_SETTINGS["chain-strangers"], "cache: hears from a stranger AskLease("),
        (FLEET_SETTINGS["take-over-strangers"], "prefill: hears from a stranger TakeOver("),
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
