"""A request that wants to be handed over, or not, whatever the policy is."""

import pytest

from disagg.messages.submit import Role
from disagg.routing.policy.registry import POLICIES
from tests.unit.routing.measured_fleet import D, P, fleet, roles, say, served

HANDED_OVER = {"p": Role.PREFILL, "d": Role.DECODE}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_is_planned_as_it_wants(policy: str) -> None:
    for wanted in (True, False):
        router = fleet(P, D, policy=policy)
        found = roles(served(router, hand_over=wanted))
        assert found == HANDED_OVER if wanted else found in ({"p": Role.LOCAL}, {"d": Role.LOCAL})


def test_control_without_a_wish_it_is_the_policys() -> None:
    for wanted, expected in ((None, {"d": Role.LOCAL}), (True, HANDED_OVER)):
        router = fleet(P, D)
        say(router, P, num_prefill_tokens_queued=9_000, num_waiting=5)
        assert roles(served(router, hand_over=wanted)) == expected
