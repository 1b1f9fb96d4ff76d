"""Everything that can happen to a request that is planned anew; and what breaks without a rule."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from disagg.checking.explorer import Step
from disagg.checking.generation_setting import DECODE, GenerationSetting
from disagg.checking.generation_state import State
from disagg.checking.generation_world import GenerationWorld
from disagg.checking.generation_worlds import GENERATION_SETTINGS
from disagg.checking.worlds import WORLDS, World
from disagg.routing.core import RouterCore
from disagg.scheduling.worker_core import WorkerCore
from tests.unit.transfer import generation_mutants as mutants
from tests.unit.transfer.generation_mutants import destinations_dropped, router, token_0_once
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
NO_WAY, TWO = "no way leads to a goal", "two different tokens came for position 2: 12 and 22"
MutateRouter = Callable[[RouterCore], None]
MutateWorker = Callable[[WorkerCore], None]

MUTANTS: dict[str, tuple[GenerationSetting, MutateRouter | None, MutateWorker | None, str]] = {
    "tokens of any generation": (
        CRASH,
        router(mutants.OutputsOfAnyGeneration),
        None,
        TWO,
    ),
    "tokens of any generation, at any position": (
        PREFILL_CRASH,
        router(mutants.OutputsOfAnyGenerationNext),
        None,
        "the client gets token 0 twice",
    ),
    "accepted tokens are not in the next prompt": (
        CRASH,
        router(mutants.ForgetsAcceptedTokens),
        None,
        TWO,
    ),
    "ends of any generation": (
        CRASH,
        router(mutants.EndsOfAnyGeneration),
        None,
        "given up after 3 plans",
    ),
    "generations are not numbered": (
        CRASH,
        router(mutants.NumbersNothing),
        None,
        "given up after 3 plans",
    ),
    "what is planned anew is not cancelled": (
        CRASH,
        router(mutants.TellsNobodyOfTheNewPlan),
        None,
        NO_WAY,
    ),
    "what has all its tokens is not cancelled": (
        TAKE_OVER,
        router(mutants.TellsNobodyOfTheEnd),
        None,
        NO_WAY,
    ),
    "token 0 is said once, and a gap is not seen": (
        PREFILL_CRASH,
        router(mutants.SeesNoGaps),
        token_0_once,
        NO_WAY,
    ),
    "token 0 is said once, and early tokens are kept": (
        CRASH,
        router(mutants.WithEarlyTokens),
        token_0_once,
        "the client gets 13, which was sampled after other tokens than (22,)",
    ),
    "destinations dropped when a generation is given up": (
        SESSION,
        None,
        destinations_dropped,
        "held by no transfer",
    ),
    "a replaced session is still listened to": (
        replace(SESSION, late_sessions=True),
        None,
        None,
        NO_WAY,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_taken_away_breaks(name: str) -> None:
    setting, mutate_router, mutate, what = MUTANTS[name]
    if mutate_router is not None:
        setting = replace(setting, mutate_router=mutate_router)
    if mutate is not None:
        setting = replace(setting, mutate=mutate)
    seen = GenerationWorld(setting).explore()
    print(f"{name}: {seen}")
    assert seen.problem, str(seen)
    assert what in seen.problem, str(seen)


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
