"""What a running fleet adds to steps and messages: HTTP, tokens of the text, the worker's own work.

An engine that is measured alone has the machine and the interpreter for itself. In a worker it
shares them with streams, in a fleet of one machine also with other workers, router and clients.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from disagg.commands.fleet_requests import ANSWER_TOKENS, Asked, RunningFleet
from disagg.commands.simulate import fleet_of
from disagg.commands.varied_lengths import varied_length
from disagg.config.settings import Settings
from disagg.errors import ConfigError
from disagg.simulation.curves import NOTHING, Curves, Line, Surface
from disagg.simulation.figures import Slos
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import World

PROMPT_TOKENS = 48
LONGER_PROMPTS = (120, 240, 960)
"""Tokens of the other prompts that are asked alone, of each at most half of what the model takes.
What is between two of them is on a line, so these are where prompts of requests are; none is a
chunk more where it is varied, if chunks are a power of two."""
STREAMS_PER_WORKER = 4
"""At once, where what a sequence adds to a step is measured."""
REST_S = 0.3
"""Before requests are asked: those of users come to workers at rest, whose caches others have used
meanwhile, more often than right after another one."""
APART_MS = 60_000.0
NO_SLOS = Slos(0, 0)


@dataclass(frozen=True, slots=True)
class AskShape:
    """Requests that are asked together.

    Attributes:
        num_prompt: tokens of each prompt.
        at_once: requests that are timed.
        beside: requests that have begun before them, and keep other workers busy.
    """

    num_prompt: int
    at_once: int = 1
    beside: int = 0


Answers = Mapping[AskShape, Asked]
"""What requests of every shape took."""


def ask_shapes(curves: Curves, settings: Settings) -> tuple[AskShape, ...]:
    """What is asked: alone, by the length of the prompt, several at once, beside busy workers.

    Args:
        curves: of which the longest prompt and the workers of a host are known.
        settings: of the fleet.
    """
    longest = curves.max_model_tokens // 2
    alone = [num for num in LONGER_PROMPTS if num <= longest] or [longest]
    cluster = settings.cluster
    num_workers = cluster.num_prefill + cluster.num_decode + cluster.num_both
    num_beside = min(curves.workers_per_host, num_workers) - 1
    lengths = (PROMPT_TOKENS, _beside_tokens(alone)) if num_beside > 0 else ()
    return (
        AskShape(PROMPT_TOKENS),
        AskShape(PROMPT_TOKENS, STREAMS_PER_WORKER * num_decoding(settings)),
        *map(AskShape, alone),
        *(AskShape(num, 1, num_beside) for num in lengths),
    )


def ask_fleet(
    shapes: Sequence[AskShape], fleet: RunningFleet, repeats: int, say: Callable[[str], None]
) -> Answers:
    """Ask requests of every shape, all shapes one after the other in each of the rounds.

    Args:
        shapes: of `ask_shapes`.
        fleet: does nothing else meanwhile.
        repeats: rounds, after a first one; the median counts.
        say: told of every round.

    Raises:
        RemoteFault: the fleet does not answer, refuses, or serves somebody.
    """
    fleet.wait_until_idle()

    def ask(one: AskShape, number: int) -> Asked:
        time.sleep(REST_S)
        num_prompt = varied_length(one.num_prompt, number, repeats)
        return middle(fleet.ask_at_once(one.at_once, num_prompt, one.beside))

    for one in shapes:  # connections, first steps
        ask(one, 0)
    rounds = []
    for number in range(repeats):
        say(f"requests to the fleet, {number + 1} of the repeats")
        rounds.append([ask(one, number) for one in shapes])
    same = zip(*rounds, strict=True)
    return {shape: middle(found) for shape, found in zip(shapes, same, strict=True)}


def middle(found: Sequence[Asked]) -> Asked:
    """Medians of each time."""
    compute = [one.compute_ms for one in found if one.compute_ms is not None]
    return Asked(
        statistics.median(one.ttft_ms for one in found),
        statistics.median(one.tpot_ms for one in found),
        statistics.median(compute) if compute else None,
    )


def with_serving(curves: Curves, settings: Settings, answers: Answers) -> Curves:
    """Curves with which requests take what they took.

    What a step takes more is seen in the time between the tokens of requests alone, what a prompt's
    steps take in what its worker says of them, what a sequence takes more in the tokens of several,
    and what a request is on its way in the first tokens, by the length of the prompt. For what
    other workers of the host cost see `with_beside`.

    Args:
        curves: whatever they have of these parts is forgotten.
        settings: of the fleet.
        answers: to `ask_shapes` of the same curves and settings.

    Raises:
        ConfigError: the settings' workers answer nothing.
    """
    curves = replace(
        curves,
        request=NOTHING,
        request_beside_ms=0.0,
        step_more_ms=0.0,
        sequence_more_ms=0.0,
        beside_share=0.0,
    )
    alone = {
        shape.num_prompt: one
        for shape, one in sorted(answers.items(), key=lambda each: each[0].num_prompt)
        if shape.at_once == 1 and not shape.beside
    }
    more = [
        one.tpot_ms - simulated(curves, settings, AskShape(num)).tpot_ms
        for num, one in alone.items()
    ]
    step_ms = max(0.0, statistics.median(more))
    curves = with_prefill(replace(curves, step_more_ms=step_ms), settings, alone)
    beside = {shape.num_prompt: one for shape, one in answers.items() if shape.beside}
    curves = with_beside(curves, settings, alone, beside)
    several = next(shape for shape in answers if shape.at_once > 1)
    rest_ms = answers[several].tpot_ms - simulated(curves, settings, several).tpot_ms
    rest_ms /= (STREAMS_PER_WORKER - 1) * (1 + curves.beside_share)
    # The one sequence of a step of one is part of that.
    sequence_ms = min(step_ms, max(0.0, rest_ms))
    curves = replace(curves, step_more_ms=step_ms - sequence_ms, sequence_more_ms=sequence_ms)
    way_ms = [
        max(0.0, one.ttft_ms - simulated(curves, settings, AskShape(num)).ttft_ms)
        for num, one in alone.items()
    ]
    return replace(curves, request=Line(tuple(map(float, alone)), tuple(way_ms)))


def with_prefill(curves: Curves, settings: Settings, alone: Mapping[int, Asked]) -> Curves:
    """Curves whose steps of prompts take what the workers say; the same where they say nothing.

    Args:
        curves: with what every step takes more.
        settings: of the fleet.
        alone: by tokens of the prompt.
    """
    step_tokens = fleet_of(settings, curves, NO_SLOS).limits.max_step_tokens
    factors: dict[float, float] = {}
    for num, one in alone.items():
        if one.compute_ms is not None:
            engine_ms = one.compute_ms - -(-num // step_tokens) * curves.step_more_ms
            ratio = engine_ms / curves.prompt_ms(num, step_tokens)
            factors[float(min(num, step_tokens))] = max(0.0, ratio)
    if not factors:
        return curves
    factor = Line(tuple(factors), tuple(factors.values()))
    last, before = factor.along[-1], curves.prefill
    # Chunks of the lengths that were asked have points of their own; beyond nothing was asked.
    across = tuple(sorted({*before.across, *factor.along}))
    rows = tuple(
        tuple(before.at(num, along) * factor.at(min(num, last)) for along in before.along)
        for num in across
    )
    return replace(curves, prefill=Surface(across, before.along, rows))


def with_beside(
    curves: Curves, settings: Settings, alone: Mapping[int, Asked], beside: Mapping[int, Asked]
) -> Curves:
    """Curves whose steps and requests take longer while other workers of the host compute.

    By how much a prompt's steps are longer there is what their worker says of the longest one;
    where it says nothing, by how much more a longer prompt's first token comes later than a
    shorter one's. What first tokens come later besides is the way's, in the mean of all lengths.

    Args:
        curves: with what prompts take.
        settings: of the fleet.
        alone: by tokens of the prompt.
        beside: likewise, while others of the host answer; may be empty.
    """
    if not beside:
        return curves
    more = {num: one.ttft_ms - alone[num].ttft_ms for num, one in beside.items()}
    computes = {num: simulated(curves, settings, AskShape(num)).ttft_ms for num in beside}
    shortest, longest = min(beside), max(beside)
    said, said_alone = beside[longest].compute_ms, alone[longest].compute_ms
    if said is not None and said_alone:
        share = said / said_alone - 1
    else:
        apart_ms = computes[longest] - computes[shortest]
        share = (more[longest] - more[shortest]) / apart_ms if apart_ms > 0 else 0.0
    share = max(0.0, share)
    way_ms = statistics.mean(more[num] - share * computes[num] for num in beside)
    return replace(curves, beside_share=share, request_beside_ms=max(0.0, way_ms))


def fitted(curves: Curves, settings: Settings, answers: Answers) -> dict[str, Any]:
    """What was asked, beside what the curves say of it, for people."""
    return {
        "answer_tokens": ANSWER_TOKENS,
        "requests": [
            asdict(shape)
            | {
                "measured_ms": asdict(one),
                "simulated_ms": asdict(simulated(curves, settings, shape)),
            }
            for shape, one in answers.items()
            if not shape.beside
        ],
        "beside": [
            asdict(shape) | {"measured_ms": asdict(one)}
            for shape, one in answers.items()
            if shape.beside
        ],
    }


def num_decoding(settings: Settings) -> int:
    """Workers among which streams are shared."""
    return settings.cluster.num_both or settings.cluster.num_decode


def _beside_tokens(alone: Sequence[int]) -> int:
    """Of those lengths one that a step computes while streams go on, and that takes a while."""
    return min(alone, key=lambda num: abs(num - 256))


def simulated(curves: Curves, settings: Settings, shape: AskShape) -> Asked:
    """Requests of a shape in virtual time, after as many that nobody counts; none beside them."""
    trace = [
        TraceRequest(
            number // shape.at_once * APART_MS,
            shape.num_prompt,
            ANSWER_TOKENS,
            (),
            (number,) * shape.num_prompt,
        )
        for number in range(3 * shape.at_once)
    ]
    outcomes = World(fleet_of(settings, curves, NO_SLOS)).run(trace)[shape.at_once :]
    found = [
        Asked(one.ttft_ms, one.tpot_ms)
        for one in outcomes
        if one.ttft_ms is not None and one.tpot_ms is not None
    ]
    if not found:
        raise ConfigError("the settings' workers answer nothing", param="cluster")
    return middle(found)
