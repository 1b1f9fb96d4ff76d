"""Rules of planning anew taken away from the router, or from its workers."""

from dataclasses import replace
from typing import Any

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.generation_world import GenerationWorld
from disagg.checking.explorer.generation_worlds import GENERATION_SETTINGS
from disagg.routing.request_table import RequestTable
from tests.unit.transfer import generation_mutants as mutants
from tests.unit.transfer.generation_mutants import router
from tests.unit.transfer.mutants import DestinationsDroppedAtAbort
from tests.unit.transfer.taken_away import TakenAway, at


def generation_without(
    rule: str,
    name: str,
    num_steps: int,
    ends: str,
    as_well: str = "",
    *,
    requests: type[RequestTable] | None = None,
    worker: tuple[str, type] | None = None,
    **changes: Any,
) -> TakenAway:
    """A row of a `GenerationWorld`.

    Args:
        rule: as in `TakenAway`.
        name: of the world, less its first word.
        num_steps: as in `TakenAway`.
        ends: as in `TakenAway`.
        as_well: as in `TakenAway`.
        requests: what the router's table of requests becomes.
        worker: path and class of what becomes another at every worker.
        changes: of the world's setting.
    """
    name = f"generation-{name}"
    setting = replace(GENERATION_SETTINGS[name], **changes)
    names = [f"`{cls.__name__}`" for cls in (requests, worker and worker[1]) if cls is not None]
    if requests is not None:
        setting = replace(setting, mutate_router=router(requests))
    if worker is not None:
        setting = replace(setting, mutate=at(*worker))
    said = ", ".join(f"{key}={value}" for key, value in changes.items())

    def explore() -> Exploration:
        return GenerationWorld(setting).explore()

    return TakenAway(
        rule, " + ".join(names) or f"`{said}`", f"`{name}`", explore, num_steps, ends, as_well
    )


TOKEN_0_ONCE = ("decode_side", mutants.TellsToken0Once)
GENERATION_RULES = (
    generation_without(
        "the generation of tokens is checked",
        "decode-crash",
        15,
        "router: hears of prefill StepOutputs: an error to the client: two different tokens came "
        "for position 2",
        requests=mutants.OutputsOfAnyGeneration,
    ),
    generation_without(
        "the generation of token 0 is checked",
        "prefill-crash",
        18,
        "router: hears of decode StepOutputs: the client gets token 0 twice",
        "positions of tokens",
        requests=mutants.OutputsOfAnyGenerationNext,
    ),
    generation_without(
        "accepted tokens are in the next prompt",
        "decode-crash",
        15,
        "router: hears of prefill StepOutputs: an error to the client: two different tokens came "
        "for position 2",
        requests=mutants.ForgetsAcceptedTokens,
    ),
    generation_without(
        "the generation of ends is checked",
        "decode-crash",
        10,
        "router: hears of prefill PartEnded: an error to the client: given up after 3 plans, at "
        "last for reserve_refused: refused 1 times",
        requests=mutants.EndsOfAnyGeneration,
    ),
    generation_without(
        "every plan has its number",
        "decode-crash",
        10,
        "router: hears of prefill PartEnded: an error to the client: given up after 3 plans, at "
        "last for reserve_refused: refused 1 times",
        requests=mutants.NumbersNothing,
    ),
    generation_without(
        "what is planned anew is cancelled at both workers",
        "decode-crash",
        16,
        "decode: hears Submit: nothing leads to a good end any more",
        requests=mutants.TellsNobodyOfTheNewPlan,
    ),
    generation_without(
        "what has all its tokens is cancelled where it may go on",
        "take-over",
        16,
        "second: hears Submit: nothing leads to a good end any more",
        requests=mutants.TellsNobodyOfTheEnd,
    ),
    generation_without(
        "the decode worker says token 0 again",
        "prefill-crash",
        15,
        "router: loses prefill: nothing leads to a good end any more",
        "a gap is planned anew",
        requests=mutants.SeesNoGaps,
        worker=TOKEN_0_ONCE,
    ),
    generation_without(
        "early tokens of an old plan are dropped",
        "decode-crash",
        26,
        "router: hears of prefill StepOutputs: the client gets 13, which was sampled after other "
        "tokens than (22,)",
        "token 0 said again",
        requests=mutants.WithEarlyTokens,
        worker=TOKEN_0_ONCE,
    ),
    generation_without(
        "destinations are held until every READ is terminal, also of an old plan",
        "session",
        9,
        "decode: READ 1 is DONE: a READ lands in block 4, held by no transfer",
        worker=("inbound", DestinationsDroppedAtAbort),
    ),
    generation_without(
        "a session that another one has replaced is not listened to",
        "session",
        9,
        "decode: hears Submit: nothing leads to a good end any more",
        late_sessions=True,
    ),
)
