"""The other side: `disagg simulate`'s world with the fleet's curves, and the same requests."""

from collections.abc import Sequence

from benchmarks.policy.calibration import NUM_AT_ONCE, WARM_UP_RATE, WARM_UP_SEED
from benchmarks.policy.fleet import System
from benchmarks.policy.switched import SWITCHED, Switched
from benchmarks.policy.traces import MIXES, make_trace, whole_prompts
from benchmarks.simulation.measured import WARM_UP, calibrated_as, fleet_settings
from benchmarks.simulation.runs import Run, Seen, mean_answers
from disagg.commands.measured_fleet import NO_SLOS, with_serving
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


def curves_of(engine: Curves, rule: System, run: Run) -> Curves:
    """The fleet's curves by the mean of the calibrations before and after a run under a rule."""
    settings = fleet_settings(calibrated_as(rule))
    return with_serving(engine, settings, mean_answers(run.calibrations))


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
