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
