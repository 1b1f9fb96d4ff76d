"""Every policy in the whole system, simulated: exact tokens, faults, nothing that stays held."""

import pytest

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.routing.policy.registry import POLICIES
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.simulation import Simulation

LAYOUT = plan_layout([FullAttentionSpec(4, 1, 8, 4), SlidingWindowSpec(4, 1, 8, 4, 9)])


def played(policy: str, seed: int, **changes: int) -> Simulation:
    config = SimulationConfig(
        LAYOUT,
        roles=("prefill", "prefill", "decode", "decode"),
        policy=policy,
        num_requests=40,
        continued_per_mille=400,
        step_token_us=500,
        **changes,  # type: ignore[arg-type]
    )
    world = Simulation(config, seed)
    world.run()
    return world


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_world_with_faults_ends_well_under_every_policy(policy: str, seed: int) -> None:
    played(policy, seed, num_kills=2, num_cuts=1, num_cancels=2)


def test_workers_measure_and_the_policy_goes_by_it() -> None:
    """Negative control of the above: plans are estimated there, and another rule's are others."""
    by_times, by_rule = played("estimated", 1), played("prefix_then_load", 1)
    expected = [
        generation.estimate is not None
        for world in (by_times, by_rule)
        for name in world.clients
        if (record := world.router.record(name)) is not None
        for generation in record.generations
    ]
    assert sum(expected) > 20
    kinds = [world.router.counters["plans", "local"] for world in (by_times, by_rule)]
    assert kinds[0] > kinds[1]
