"""Everything that can happen to a request that is planned anew."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.generation_setting import DECODE, GenerationSetting
from disagg.checking.explorer.generation_state import State
from disagg.checking.explorer.generation_world import GenerationWorld
from disagg.checking.explorer.generation_worlds import GENERATION_SETTINGS
from disagg.checking.explorer.worlds import WORLDS, World
from tests.unit.transfer import generation_mutants as mutants
from tests.unit.transfer.generation_mutants import router, token_0_once
from tests.unit.transfer.test_pair_explorer import exhaust

NAMED = [world for world in WORLDS if world.name in GENERATION_SETTINGS]


@pytest.mark.parametrize("world", [w for w in NAMED if not w.only_full], ids=lambda w: w.name)
def test_the_right_tokens_once_and_every_hold_ends(world: World) -> None:
    exhaust(world)


PREFILL_CRASH = GENERATION_SETTINGS["generation-prefill-crash"]
DECODE_CRASH = GENERATION_SETTINGS["generation-decode-crash"]
TAKE_OVER = GENERATION_SETTINGS["generation-take-over"]
SESSION = GENERATION_SETTINGS["generation-session"]
CRASH = GenerationSetting(crashes=(DECODE,))


COVERED: dict[str, GenerationSetting] = {
    "gaps are seen": replace(PREFILL_CRASH, mutate_router=router(mutants.SeesNoGaps)),
    "token 0 is said again": replace(PREFILL_CRASH, mutate=token_0_once),
    "early tokens are dropped": replace(CRASH, mutate_router=router(mutants.WithEarlyTokens)),
}


@pytest.mark.parametrize("name", COVERED)
def test_a_rule_that_another_covers_can_go_alone(name: str) -> None:
    """Why some rows of `generation_rules` take two rules away together."""
    seen = GenerationWorld(COVERED[name]).explore()
    assert seen.exhausted, str(seen)


@pytest.mark.parametrize(
    ("setting", "generations", "reached"),
    [
        (PREFILL_CRASH, 2, "decode: hears Submit(r2, local, (5, 6, 12))"),
        (PREFILL_CRASH, 2, "decode: hears Submit(r2, local, (5, 6))"),
        (DECODE_CRASH, 2, "prefill: hears Submit(r2, local, (5, 6, 12, 13))"),
        (DECODE_CRASH, 2, "router: hears of prefill StepOutputs(outputs=(SequenceOutput(key=r1"),
        (DECODE_CRASH, 2, "router: hears of prefill PartEnded(key=r1"),
        (TAKE_OVER, 2, "second: hears CommitAnswer(key=r2"),
        (TAKE_OVER, 1, "prefill: nobody took it over"),
        (SESSION, 2, "decode: has a new session"),
    ],
)
def test_the_worlds_reach_what_they_are_for(
    setting: GenerationSetting, generations: int, reached: str
) -> None:
    """Control: an exhausted world in which nothing happens shows nothing."""
    world = GenerationWorld(setting)
    steps = world.steps

    def watched(now: State) -> Iterator[Step[State]]:
        for step in steps(now):
            if step.label.startswith(reached) and len(now.prompts) >= generations:
                raise Reached
            yield step

    world.steps = watched  # type: ignore[method-assign]
    with pytest.raises(Reached):
        world.explore()


class Reached(Exception):
    """What was looked for was seen."""


def test_a_router_thaws_as_it_was_frozen() -> None:
    world = GenerationWorld(SESSION)
    start = world.start().router
    core = world.routers.thaw(start)
    assert core._fleet is core._requests._fleet
    assert world.routers._freeze(core) == start
    core.cancel(0, "r", "gone")
    assert world.routers._freeze(core) != start
