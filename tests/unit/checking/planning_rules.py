"""Rules of planning anew taken away from the router, or from its workers."""

from tests.unit.checking import planning_mutants as mutants
from tests.unit.checking.lease_mutants import DestinationsDroppedAtAbort
from tests.unit.checking.taken_away import without

TOKEN_0_ONCE = {"decode_side": mutants.SendsToken0Once}
PLANNING_RULES = (
    without(
        "the generation of tokens is checked",
        "generation-decode-crash",
        15,
        "router: hears of prefill StepOutputs: an error to the client: two different tokens came "
        "for position 2",
        planner=mutants.OutputsOfAnyGeneration,
    ),
    without(
        "the generation of token 0 is checked",
        "generation-prefill-crash",
        18,
        "router: hears of decode StepOutputs: the client gets token 0 twice",
        "positions of tokens",
        planner=mutants.OutputsOfAnyGenerationNext,
    ),
    without(
        "accepted tokens are in the next prompt",
        "generation-decode-crash",
        15,
        "router: hears of prefill StepOutputs: an error to the client: two different tokens came "
        "for position 2",
        planner=mutants.ForgetsAcceptedTokens,
    ),
    without(
        "the generation of ends is checked",
        "generation-decode-crash",
        10,
        "router: loses decode: an error to the client: given up after 3 plans, at last for "
        "worker_lost: decode: session_ended",
        planner=mutants.EndsOfAnyGeneration,
    ),
    without(
        "every plan has its number",
        "generation-decode-crash",
        10,
        "router: loses decode: an error to the client: given up after 3 plans, at last for "
        "worker_lost: decode: session_ended",
        planner=mutants.NumbersNothing,
    ),
    without(
        "what is planned anew is cancelled at both workers",
        "generation-decode-crash",
        16,
        "decode: hears Submit: nothing leads to a good end any more",
        planner=mutants.TellsNobodyOfTheNewPlan,
    ),
    without(
        "what has all its tokens is cancelled where it may go on",
        "generation-take-over",
        17,
        "second: hears Submit: nothing leads to a good end any more",
        planner=mutants.TellsNobodyOfTheEnd,
    ),
    without(
        "the decode worker sends token 0 again",
        "generation-prefill-crash",
        15,
        "router: loses prefill: nothing leads to a good end any more",
        "a gap is planned anew",
        planner=mutants.SeesNoGaps,
        mutants=TOKEN_0_ONCE,
    ),
    without(
        "early tokens of an old plan are dropped",
        "generation-decode-crash",
        26,
        "router: hears of prefill StepOutputs: the client gets 13, which was sampled after other "
        "tokens than (22,)",
        "token 0 said again",
        planner=mutants.WithEarlyTokens,
        mutants=TOKEN_0_ONCE,
    ),
    without(
        "what a stalled worker has goes on elsewhere once",
        "generation-stalled",
        10,
        "router: hears of second WorkerStats: an error to the client: given up after 2 plans, at "
        "last for worker_stalled: second: its step does not end",
        planner=mutants.MovesAgain,
        generations_max=2,
    ),
    without(
        "destinations are held until every READ is terminal, also of an old plan",
        "generation-session",
        9,
        "decode: READ 1 is DONE: a READ lands in block 4, held by no transfer",
        mutants={"inbound": DestinationsDroppedAtAbort},
    ),
    without(
        "a session that another one has replaced is not listened to",
        "generation-session",
        9,
        "decode: hears Submit: nothing leads to a good end any more",
        late_sessions=True,
    ),
)
