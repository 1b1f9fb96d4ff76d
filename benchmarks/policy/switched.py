"""The production router with one addition: its rule is named on standard input, as often as wanted.

So every rule plans for the same warm workers by the same measured speeds, one after the other.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from typing import ClassVar

from disagg.router.app import RouterApp
from disagg.router.options import RouterOptions
from disagg.router.process import log_as
from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import Policy
from disagg.routing.policy.protocol import Demand, Plan, PolicyOptions
from disagg.routing.policy.registry import DEFAULT_POLICY, POLICIES
from disagg.telemetry.garbage_collector import spare_garbage_collector

SWITCHED = "switched"
COMMAND = "policy"


class Switched:
    """Every policy of the registry, of which one is asked.

    Args:
        options: of the router; what it says of SLOs is told later.
    """

    made: ClassVar[list["Switched"]] = []
    """The router makes one."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self.become(DEFAULT_POLICY, 0.0)
        self.made.append(self)

    def become(self, name: str, slo_tpot_ms: float) -> None:
        """Plan by this rule from now on, with that as `router.slo_tpot_ms`."""
        options = replace(self._options, slo_tpot_ms=slo_tpot_ms)
        self._rule: Policy = POLICIES[name](options)

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """See `Policy.plan`."""
        return self._rule.plan(demand, candidates)

    def waits(self, best: Plan, now: Plan) -> bool:
        """See `Policy.waits`."""
        return self._rule.waits(best, now)


def _obey() -> None:
    for line in sys.stdin:
        _, name, slo_tpot_ms = line.split()
        for one in Switched.made:
            one.become(name, float(slo_tpot_ms))
        sys.stdout.write(f"ok {line.strip()}\n")
        sys.stdout.flush()


async def _serve(options: RouterOptions) -> None:
    app = RouterApp(options)
    await app.start()
    spare_garbage_collector()  # as a router that is no benchmark's
    ports = {name: getattr(app, name) for name in ("http_port", "admin_port", "grpc_port")}
    sys.stdout.write("serving " + json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(_obey)
    await app.stop()


if __name__ == "__main__":
    POLICIES[SWITCHED] = Switched
    given = RouterOptions(**json.loads(sys.argv[1]))
    log_as(given)
    asyncio.run(_serve(given))
    os._exit(0)  # the interpreter's own end takes seconds
