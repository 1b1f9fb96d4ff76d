"""Curves with which simulated requests take what a running fleet's took, see `measured_fleet`."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from disagg.commands.fleet_requests import ANSWER_TOKENS, Asked
from disagg.commands.measured_fleet import Answers, AskShape, middle
from disagg.commands.simulate import fleet_of
from disagg.config.settings import Settings
from disagg.errors import ConfigError
from disagg.simulation.curves import NOTHING, Curves, Line, Surface
from disagg.simulation.figures import Slos
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import World

APART_MS = 60_000.0
NO_SLOS = Slos(0, 0)


def with_serving(curves: Curves, settings: Settings, answers: Answers) -> Curves:
    """Curves with which requests take what they took.

    What a step takes more is seen in the time between the later tokens of requests alone, what a
    hand-over's READ takes more in their second token, what a prompt's steps take in what its
    worker says of them, what a sequence takes more in the tokens of several, and what a request is
    on its way in the first tokens, by the length of the prompt. For what other workers of the host
    cost see `with_beside`.

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
        read_more_ms=0.0,
        beside=NOTHING,
    )
    alone = {
        shape.num_prompt: one
        for shape, one in sorted(answers.items(), key=lambda each: each[0].num_prompt)
        if shape.is_alone
    }
    more = [
        one.later_tpot_ms - simulated(curves, settings, AskShape(num)).later_tpot_ms
        for num, one in alone.items()
    ]
    step_ms = max(0.0, statistics.median(more))
    curves = with_prefill(replace(curves, step_more_ms=step_ms), settings, answers)
    curves = with_beside(curves, settings, answers)
    curves = replace(curves, read_more_ms=read_more_ms(curves, settings, alone))
    curves = with_sequences(curves, settings, answers)
    way_ms = [
        max(0.0, one.ttft_ms - simulated(curves, settings, AskShape(num)).ttft_ms)
        for num, one in alone.items()
    ]
    return replace(curves, request=Line(tuple(map(float, alone)), tuple(way_ms)))


def with_prefill(curves: Curves, settings: Settings, answers: Answers) -> Curves:
    """Curves whose steps of prompts take what the workers say; the same where they say nothing.

    Steps are scaled by their tokens, each length that was asked by what it took. Of prompts of
    several steps the shortest one says it of whole steps, the longest one of those behind so many
    tokens; prompts behind a cached prefix say it of short steps there.

    Args:
        curves: with what every step takes more.
        settings: of the fleet.
        answers: of which those alone and those behind a prefix are used.
    """
    step_tokens = fleet_of(settings, curves, NO_SLOS).limits.max_step_tokens
    told = {
        shape: one.compute_ms - -(-shape.num_prompt // step_tokens) * curves.step_more_ms
        for shape, one in answers.items()
        if one.compute_ms is not None
    }
    alone = {shape.num_prompt: ms for shape, ms in told.items() if shape.is_alone}
    if not alone:
        return curves
    rows = {
        num: Line((0.0,), (ms / curves.prefill.at(num, 0),))
        for num, ms in sorted(alone.items())
        if num <= step_tokens
    }
    behind: dict[int, float] = {}
    for shape, ms in told.items():
        start = round(answers[shape].num_cached)
        num = shape.num_prefix + shape.num_prompt - start
        if shape.num_prefix and start and num <= step_tokens and shape.num_prompt in rows:
            ratio = ms / curves.prefill.at(num, start)
            behind[shape.num_prompt] = ratio / rows[shape.num_prompt].at(0)
            behind_from = float(start)
    if behind:
        more = _line({max(alone): 1.0} | behind)  # of longer steps there nothing is known
        for num, row in rows.items():
            rows[num] = Line((0.0, behind_from), (row.at(0), row.at(0) * more.at(num)))
    if longer := [num for num in alone if num > step_tokens]:
        rows[step_tokens] = _whole_steps(curves, alone, min(longer), max(longer), step_tokens)
    return replace(curves, prefill=_scaled(curves.prefill, rows))


def _whole_steps(
    curves: Curves, alone: Mapping[int, float], shorter: int, longer: int, step_tokens: int
) -> Line:
    """Factors of whole steps by the tokens before them: a prompt's, then those of a longer one."""
    factor = max(0.0, alone[shorter] / curves.prompt_ms(shorter, step_tokens))
    last = (shorter - 1) // step_tokens * step_tokens
    known_ms = curves.prompt_ms(last + step_tokens, step_tokens)
    if longer <= last + step_tokens:
        return Line((0.0,), (factor,))
    rest_ms = curves.prompt_ms(longer, step_tokens) - known_ms
    other = max(0.0, (alone[longer] - factor * known_ms) / rest_ms)
    return Line((float(last), float(last + step_tokens)), (factor, other))


def _scaled(surface: Surface, rows: Mapping[int, Line]) -> Surface:
    """Steps scaled by factors, by their tokens and those before them, with points at these."""
    across = tuple(sorted({*surface.across, *map(float, rows)}))
    along = tuple(sorted({*surface.along, *(one for row in rows.values() for one in row.along)}))

    def factor(num: float, before: float) -> float:
        there = {one: row.at(min(before, row.along[-1])) for one, row in rows.items()}
        return _line(there).at(min(num, max(rows)))

    ms = [[surface.at(num, one) * factor(num, one) for one in along] for num in across]
    return Surface(across, along, tuple(map(tuple, ms)))


def _line(points: Mapping[int, float]) -> Line:
    along = sorted(points)
    return Line(tuple(map(float, along)), tuple(points[one] for one in along))


def with_beside(curves: Curves, settings: Settings, answers: Answers) -> Curves:
    """Curves whose steps and requests take longer while other workers of the host compute.

    By how much a prompt's steps are longer is what their worker says of each length, and by how
    much steps that decode are, is seen in the streams beside the longest one. Where workers say
    nothing it is one share for all: how much more a longer prompt's first token comes later than a
    shorter one's. What first tokens come later besides is the way's, in the mean of all lengths.

    Args:
        curves: with what prompts take.
        settings: of the fleet.
        answers: of which those alone and those beside others are used; there may be none of these.
    """
    beside = {shape.num_prompt: one for shape, one in answers.items() if shape.beside}
    if not beside:
        return curves
    alone = {shape.num_prompt: one for shape, one in answers.items() if shape.is_alone}
    step_tokens = fleet_of(settings, curves, NO_SLOS).limits.max_step_tokens
    later_ms = {num: one.ttft_ms - alone[num].ttft_ms for num, one in beside.items()}
    shares: dict[int, float] = {}
    for num, one in sorted(beside.items()):
        said, said_alone = one.compute_ms, alone[num].compute_ms
        if said is not None and said_alone:
            shares[min(num, step_tokens)] = max(0.0, said / said_alone - 1)
            later_ms[num] -= said - said_alone
    shortest, longest = min(beside), max(beside)
    if not shares:
        computes = {num: simulated(curves, settings, AskShape(num)).ttft_ms for num in beside}
        apart_ms = computes[longest] - computes[shortest]
        share = (later_ms[longest] - later_ms[shortest]) / apart_ms if apart_ms > 0 else 0.0
        shares[0] = max(0.0, share)
        later_ms = {num: ms - shares[0] * computes[num] for num, ms in later_ms.items()}
    elif (stream_ms := beside[longest].beside_tpot_ms) is not None:
        # The streams' own prompts are short.
        alone_ms = statistics.median(
            one.later_tpot_ms for num, one in alone.items() if num < longest
        )
        shares[1] = max(0.0, stream_ms / alone_ms - 1)
    shares.setdefault(
        step_tokens, shares[max(shares)]
    )  # longer steps as the longest that was asked
    return replace(
        curves,
        beside=_line(shares),
        request_beside_ms=max(0.0, statistics.mean(later_ms.values())),
    )


def read_more_ms(curves: Curves, settings: Settings, alone: Mapping[int, Asked]) -> float:
    """What a hand-over's READ takes more, by when second tokens come.

    0 where no worker takes hand-overs alone, or nobody has seen second tokens.
    """
    more = [
        one.second_ms - (simulated(curves, settings, AskShape(num)).second_ms or 0.0)
        for num, one in alone.items()
        if one.second_ms is not None
    ]
    if not more or not settings.cluster.num_decode:
        return 0.0
    return max(0.0, statistics.median(more))


def with_sequences(curves: Curves, settings: Settings, answers: Answers) -> Curves:
    """Curves of which some of what a step takes more is each sequence's, as several take it."""
    several = next(shape for shape in answers if shape.at_once > 1)
    most = replace(curves, step_more_ms=0.0, sequence_more_ms=curves.step_more_ms)
    least_ms, most_ms = (simulated(one, settings, several).tpot_ms for one in (curves, most))
    if most_ms <= least_ms:
        return curves
    share = min(1.0, max(0.0, (answers[several].tpot_ms - least_ms) / (most_ms - least_ms)))
    sequence_ms = share * curves.step_more_ms
    return replace(
        curves, step_more_ms=curves.step_more_ms - sequence_ms, sequence_more_ms=sequence_ms
    )


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


def simulated(curves: Curves, settings: Settings, shape: AskShape) -> Asked:
    """Requests of a shape in virtual time, after as many that nobody counts; none beside them."""
    trace = []
    for number in range(3):
        at_ms = 2 * number * APART_MS
        prefix = (number,) * shape.num_prefix
        if prefix:
            trace.append(TraceRequest(at_ms, len(prefix), ANSWER_TOKENS, (), prefix))
        for other in range(shape.at_once):
            own = (3 + number * shape.at_once + other,) * shape.num_prompt
            tokens = prefix + own
            trace.append(TraceRequest(at_ms + APART_MS, len(tokens), ANSWER_TOKENS, (), tokens))
    num_before = len(trace) // 3
    outcomes = World(fleet_of(settings, curves, NO_SLOS)).run(trace)[num_before:]
    found = [
        Asked(
            one.ttft_ms,
            one.tpot_ms,
            second_ms=one.second_ms - one.first_ms,
            num_cached=one.num_cached,
        )
        for one in outcomes
        if one.request.num_prompt != shape.num_prefix
        and one.ttft_ms is not None
        and one.tpot_ms is not None
        and one.first_ms is not None
        and one.second_ms is not None
    ]
    if not found:
        raise ConfigError("the settings' workers answer nothing", param="cluster")
    return middle(found)
