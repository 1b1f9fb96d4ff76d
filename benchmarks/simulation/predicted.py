"""The other side: `disagg simulate`'s world with the fleet's curves, and the same requests."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.policy.calibration import NUM_AT_ONCE, WARM_UP_RATE, WARM_UP_SEED
from benchmarks.policy.fleet import System
from benchmarks.policy.switched import SWITCHED, Switched
from benchmarks.policy.traces import MIXES, make_trace, whole_prompts
from benchmarks.simulation.measured import RULES, WARM_UP, calibrated_as, fleet_settings
from benchmarks.simulation.runs import Run, Seen, middle_answers
from disagg.commands.fitted_fleet import NO_SLOS, with_serving
from disagg.commands.simulate import fleet_of
from disagg.routing.policy.registry import POLICIES
from disagg.simulation.curves import Curves
from disagg.simulation.fleet_plan import FleetPlan
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import Outcome, World

ANSWER_TOKEN = 0
"""Of answers in the warm-up, which the next turns of conversations repeat."""


def plan_of(curves: Curves) -> FleetPlan:
    """The fleet of `benchmarks.policy`, whose rule is chosen later."""
    return fleet_of(fleet_settings(), curves, NO_SLOS).with_policy(SWITCHED)


def curves_of(engine: Curves, runs: Sequence[Run]) -> list[Curves]:
    """The fleet's curves in each of some runs.

    Runs in a row under one rule have the same ones, by all calibrations around those of them that
    were kept. A fleet whose workers are of both roles is calibrated without hand-overs: what these
    take is what it was in the other roles.

    Args:
        engine: its curves alone.
        runs: all of a record, in their order.
    """
    found: list[Curves] = []
    for policy, together in itertools.groupby(runs, lambda one: one.policy):
        same = list(together)
        kept = [one for one in same if not one.thrown_away] or same
        answers = middle_answers([each for one in kept for each in one.calibrations])
        rule = next(one for one in RULES if one.policy == policy)
        curves = with_serving(engine, fleet_settings(calibrated_as(rule)), answers)
        found += [curves] * len(same)
    handed_over = [one.read_more_ms for one in found if one.read_more_ms]
    read_ms = statistics.median(handed_over) if handed_over else 0.0
    return [replace(one, read_more_ms=one.read_more_ms or read_ms) for one in found]


class WarmFleet:
    """The simulated fleet, whose router has learned speeds as the real one's: by the same requests.

    A rule that weighs plans by what was measured weighs none where nothing was: a fleet of workers
    of both roles never hands over that has never handed over. So it is played what the real fleet
    was, under the same rules in the same roles.
    """

    def __init__(self, curves: Curves) -> None:
        plan = plan_of(curves)
        POLICIES[SWITCHED] = Switched
        try:
            self.world = World(plan)
        finally:
            del POLICIES[SWITCHED]
        self._rule = Switched.made.pop()
        for number, system in enumerate(WARM_UP):
            trace = make_trace(MIXES[-1], WARM_UP_RATE, NUM_AT_ONCE, WARM_UP_SEED + number)
            answers = {n: (ANSWER_TOKEN,) * one.num_output_tokens for n, one in enumerate(trace)}
            self.run(
                system,
                [
                    TraceRequest(at_s * 1e3, len(prompt), num_answer, (), tuple(prompt))
                    for at_s, prompt, num_answer in whole_prompts(trace, answers)
                ],
            )

    def run(
        self, system: System, trace: Sequence[TraceRequest], slo_tpot_ms: float = 0.0
    ) -> list[Outcome]:
        """Play a trace under a rule, with this setting of the router."""
        self._rule.become(system.policy, slo_tpot_ms)
        self.world.become(system.roles)
        return self.world.run(trace)


def predict(curves: Curves, system: System, seen: Sequence[Seen]) -> list[Outcome]:
    """What becomes of the same requests, sent at the same moments, after a warm-up."""
    trace = [
        TraceRequest(one.sent_s * 1e3, len(one.prompt), len(one.answer), (), one.prompt)
        for one in seen
    ]
    return WarmFleet(curves).run(system, trace)
