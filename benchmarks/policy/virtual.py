"""The rules in virtual time: the same mixes, rates and bounds, played by a simulated fleet."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.policy.calibration import (
    ALONE_TOKENS,
    CAPACITY_SEED,
    NUM_ALONE,
    NUM_AT_ONCE,
    TPOT_FACTOR,
    TTFT_FACTOR,
    middle_prompt,
)
from benchmarks.policy.figures import Cell, Round, Served, Slo
from benchmarks.policy.fleet import System
from benchmarks.policy.systems import SYSTEMS
from benchmarks.policy.traces import KINDS, MIXES, Request, make_trace, whole_prompts
from benchmarks.simulation.predicted import ANSWER_TOKEN, WarmFleet
from disagg.routing import slo as routing
from disagg.simulation.curves import Curves
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import Outcome

APART_MS = 60_000.0
"""Between requests that are served alone."""
FAILED_MS = 1e9
"""Stands for what never came."""


class VirtualFleet:
    """Two simulated workers with these curves; every trace finds caches without its prompts."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves

    def slos(self) -> dict[str, Slo]:
        """By kind: factors of what its requests take one after the other."""
        rng, slos = random.Random(0), {}
        for kind in KINDS.values():
            prompts = [tuple(middle_prompt(rng, kind)) for _ in range(NUM_ALONE)]
            seen = WarmFleet(self._curves).run(
                SYSTEMS[0],
                [
                    TraceRequest(number * APART_MS, len(one), ALONE_TOKENS, (), one)
                    for number, one in enumerate(prompts)
                ],
            )
            slos[kind.name] = Slo(
                TTFT_FACTOR * median(one.ttft_ms or FAILED_MS for one in seen),
                TPOT_FACTOR * median(one.tpot_ms or FAILED_MS for one in seen),
            )
        return slos

    def capacity(self, mix: str) -> float:
        """Requests per second of a mix that come at once, on two workers of both roles."""
        trace = _trace(mix, 1_000.0, NUM_AT_ONCE, CAPACITY_SEED)
        seen = WarmFleet(self._curves).run(SYSTEMS[0], _requests(trace))
        return NUM_AT_ONCE / max((one.end_ms or FAILED_MS) / 1e3 for one in seen)

    def play(self, system: System, cell: Cell, slos: Mapping[str, Slo], seed: int) -> Round:
        """What becomes of a cell's requests under a rule that knows their bounds."""
        trace = _trace(cell.mix, cell.rate, cell.num_requests, seed)
        bounds = [slos[one.kind] for one in trace]
        requests = [
            replace(one, slo=routing.Slo(int(bound.ttft_ms), bound.tpot_ms))
            for one, bound in zip(_requests(trace), bounds, strict=True)
        ]
        slo_tpot_ms = min(bound.tpot_ms for bound in bounds)
        seen = WarmFleet(self._curves).run(system, requests, slo_tpot_ms)
        served = [_served(one.kind, outcome) for one, outcome in zip(trace, seen, strict=True)]
        return Round(tuple(served), cpu_s=0.0, wall_s=max(one.end_ms or 0.0 for one in seen) / 1e3)


def _trace(mix: str, rate: float, num_requests: int, seed: int) -> list[Request]:
    (found,) = (one for one in MIXES if one.name == mix)
    return make_trace(found, rate, num_requests, seed)


def _requests(trace: Sequence[Request]) -> list[TraceRequest]:
    """Later turns repeat answers, of which nobody knows the tokens: they are not found again."""
    answers = {n: (ANSWER_TOKEN,) * one.num_output_tokens for n, one in enumerate(trace)}
    return [
        TraceRequest(arrival_s * 1e3, len(prompt), num_answer, (), tuple(prompt))
        for arrival_s, prompt, num_answer in whole_prompts(trace, answers)
    ]


def _served(kind: str, outcome: Outcome) -> Served:
    if not outcome.finished or outcome.ttft_ms is None:
        return Served(kind, FAILED_MS, FAILED_MS, outcome.handed_over)
    return Served(kind, outcome.ttft_ms, outcome.tpot_ms or 0.0, outcome.handed_over)
