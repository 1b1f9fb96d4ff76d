"""Fleets beside each other: policies, rates, and how many workers prefill."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from disagg.simulation.figures import Figures, Slos, summarise
from disagg.simulation.fleet_plan import FleetPlan
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import Watch, World, no_watch

RATIOS_MAX = 9
"""Splits of a fleet that are tried; of more workers these many, evenly."""

Trace = tuple[Sequence[TraceRequest], float]
TraceAt = Callable[[float], Trace]
"""The requests at a rate, and for how many seconds they come."""


def splits(num_workers: int) -> list[tuple[int, int]]:
    """How many of the workers prefill and how many decode, from few to many who prefill.

    Raises:
        ConfigError: there are fewer than two.
    """
    if num_workers < 2:
        raise ConfigError("a ratio needs at least two workers", param="ratios")
    if num_workers - 1 <= RATIOS_MAX:
        return [(num, num_workers - num) for num in range(1, num_workers)]
    parts = {round(num_workers * part / (RATIOS_MAX + 1)) for part in range(1, RATIOS_MAX + 1)}
    return [(num, num_workers - num) for num in sorted(parts)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a comparison: a fleet at a rate."""

    plan: FleetPlan
    rate: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of fleets at rates; all fleets get the same requests at a rate.

    Attributes:
        plans: of the fleets.
        rates: requests per second.
        trace_at: makes the requests.
        slos: that count as goodput.
        seed: of the delays that workers draw.
    """

    plans: Sequence[FleetPlan]
    rates: Sequence[float]
    trace_at: TraceAt
    slos: Slos
    seed: int
    _last: dict[float, Trace] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The last rate's requests: runs of a rate follow each other, and all rates' may be many."""

    @property
    def runs(self) -> list[Run]:
        """All of them, rate by rate; none depends on another one."""
        return [Run(plan, rate) for rate in self.rates for plan in self.plans]

    def figures(self, run: Run, watch: Watch = no_watch) -> Figures:
        """Simulate one of the runs."""
        plan = run.plan
        if run.rate not in self._last:
            self._last.clear()
            self._last[run.rate] = self.trace_at(run.rate)
        trace, lasts_s = self._last[run.rate]
        return summarise(
            World(plan, self.seed).run(trace, watch),
            self.slos,
            policy=plan.router.policy,
            workers=(plan.num_prefill, plan.num_decode, plan.num_both),
            asked_rate=run.rate,
            lasts_s=lasts_s,
        )


def best_ratio(figures: Sequence[Figures]) -> dict[tuple[str, float], Figures]:
    """By policy and asked rate the fleet of the most goodput; of equal ones that of least TTFT."""
    best: dict[tuple[str, float], Figures] = {}
    for one in figures:
        known = best.get((one.policy, one.asked_rate))
        if known is None or _merit(one) > _merit(known):
            best[one.policy, one.asked_rate] = one
    return best


def _merit(figures: Figures) -> tuple[float, float]:
    return figures.goodput, -(figures.ttft_ms[0] if figures.ttft_ms else float("inf"))
