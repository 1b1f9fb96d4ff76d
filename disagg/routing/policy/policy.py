"""What every policy must keep."""

from typing import Protocol

from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.protocol import Demand, Plan


class Policy(Protocol):
    """The rule by which workers are chosen.

    Equal arguments give equal plans: no I/O, no clock, no randomness. A policy is made once, by
    calling its class with `PolicyOptions`.
    """

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """Choose among the candidates, of which at least one can decode.

        The plan's workers must be able to do their part. Everything else is a preference: who is
        excluded can still be chosen when nobody else is left.

        Raises:
            DisaggError: the request is refused, or ends if it was planned before.
        """
        ...

    def waits(self, best: Plan, now: Plan) -> bool:
        """Whether a request waits for the workers of its best plan, which have no room now.

        Args:
            best: what it would be given if all had room.
            now: the best of those who have.
        """
        ...


def misplaced(best: Plan, now: Plan) -> bool:
    """Whether a plan has one worker do all although its role is only a part of it.

    The decodes of a decode worker would wait for the prefill, because others are busy for a while.
    """
    return now.local and now.decode.info.role != "both" and not best.local
