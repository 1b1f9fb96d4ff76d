"""Every request on one worker: nothing is handed over, nothing is pulled."""

from collections.abc import Sequence

from disagg.routing.policy.protocol import Candidate, Demand, Plan, PolicyOptions


class Local:
    """The longest usable prefix, then the shortest queue, whatever the workers' roles.

    To compare disaggregation with, and to fall back on where KV cannot move between workers.
    """

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def plan(self, demand: Demand, candidates: Sequence[Candidate]) -> Plan:
        """See `Policy.plan`."""
        fitting = [c for c in candidates if c.can_decode]
        exclusions = demand.exclusions
        fresh = [c for c in fitting if c.incarnation not in exclusions.workers] or fitting
        roomy = [c for c in fresh if c.incarnation not in exclusions.decode] or fresh
        worker = min(roomy, key=lambda c: (-c.saved_tokens, c.decode_load, c.incarnation))
        return Plan(
            worker,
            worker,
            f"local on {worker.name} (prefix {worker.found_tokens} tokens, "
            f"{worker.decode_load} requests there)",
        )
