"""Every request on one worker: nothing is handed over, nothing is pulled."""

from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import misplaced
from disagg.routing.policy.protocol import Demand, Plan, PolicyOptions


class Local:
    """The longest usable prefix, then the shortest queue, whatever the workers' roles.

    To compare disaggregation with, and to fall back on where KV cannot move between workers.
    """

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """See `Policy.plan`."""
        exclusions = demand.exclusions
        fitting = candidates.can_decode
        fresh = fitting & ~candidates.of(exclusions.workers) or fitting
        roomy = fresh & ~candidates.of(exclusions.decode) or fresh
        _, best = next(candidates.by_saved_tokens(roomy))
        worker = candidates.least_loaded(best)
        return Plan(
            worker,
            worker,
            f"local on {worker.name} (prefix {worker.found_tokens} tokens, "
            f"{worker.decode_load} requests there)",
        )

    def waits(self, best: Plan, now: Plan) -> bool:
        """See `Policy.waits`."""
        return misplaced(best, now)
