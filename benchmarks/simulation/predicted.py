"""The other side: `disagg simulate`'s world with the fleet's curves, and the same requests."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.policy.fleet import System
from benchmarks.policy.traces import MIXES, make_trace
from benchmarks.simulation.measured import Seen, settings_given
from disagg.commands.arguments import read_effective
from disagg.commands.measured_fleet import NO_SLOS
from disagg.commands.simulate import fleet_of
from disagg.simulation.curves import Curves
from disagg.simulation.fleet_plan import FleetPlan
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import Outcome, World

WARM_UP_RATE, WARM_UP_REQUESTS, WARM_UP_SEED = 4.0, 16, 1_000
REST_MS = 60_000.0
"""After the warm-up, until the trace begins."""


def plan_of(curves: Curves, system: System) -> FleetPlan:
    """The fleet of `benchmarks.policy` under a rule."""
    plan = fleet_of(read_effective(None, settings_given()).settings, curves, NO_SLOS)
    num_prefill, num_decode, num_both = map(system.roles.count, ("prefill", "decode", "both"))
    plan = plan.with_policy(system.policy).with_ratio(num_prefill, num_decode)
    return replace(plan, num_both=num_both)


def predict(curves: Curves, system: System, seen: Sequence[Seen]) -> list[Outcome]:
    """What becomes of the same requests, sent at the same moments.

    Others go before them, as in the fleet, from which the router has learned how fast steps are.
    """
    before = make_trace(MIXES[-1], WARM_UP_RATE, WARM_UP_REQUESTS, WARM_UP_SEED)
    trace = [
        TraceRequest(one.arrival_s * 1e3, len(one.tokens), one.num_output_tokens, (), one.tokens)
        for one in before
    ]
    begin_ms = trace[-1].at_ms + REST_MS
    trace += [
        TraceRequest(begin_ms + one.sent_s * 1e3, len(one.prompt), len(one.answer), (), one.prompt)
        for one in seen
    ]
    return World(plan_of(curves, system)).run(trace)[len(before) :]
