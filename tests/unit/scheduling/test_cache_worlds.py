"""Simulated fleets under every policy of the prefix cache, with resets in the midst of faults."""

from dataclasses import replace

import pytest

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.scheduling.tiers.clearing import TierClearing
from disagg.testing.simulation.config import PlannedRequest, SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.simulation.symbolic_tier import SimulatedTier
from tests.unit.scheduling.test_simulation import LAYOUTS, NUM_SEEDS

POLICIES = {
    "sparse": CachePolicy(retention=Retention(0)),
    "sparse, every 12": CachePolicy(retention=Retention(12), eviction="segmented_lru"),
    "segmented": CachePolicy(eviction="segmented_lru", observe_every=3),
    "copies": CachePolicy(deduplicate=False),
    "none": CachePolicy(enabled=False),
}
PROMPT = tuple(range(40))
"""Asked again and again, each time when the answer before is complete."""
AGAIN = SimulationConfig(
    LAYOUTS["hybrid"],
    num_blocks=200,
    script=tuple(PlannedRequest(PROMPT, 4) for _ in range(4)),
)


@pytest.mark.parametrize("layout", ["hybrid", "states"])
@pytest.mark.parametrize("policy", POLICIES)
def test_faults_and_resets_under_every_policy(policy: str, layout: str) -> None:
    hits = resets = 0
    for seed in range(NUM_SEEDS):
        config = SimulationConfig(
            LAYOUTS[layout],
            roles=("prefill", "decode", "both"),
            num_blocks=90,
            num_requests=30,
            continued_per_mille=700,
            num_kills=2,
            num_cuts=2,
            num_cancels=3,
            num_resets=4,
            read_errors_per_mille=50,
            cache_policy=POLICIES[policy],
        )
        world = Simulation(config, seed)
        world.run()
        hits += world.router.counters["prefill_tokens", "hit"]
        resets += len(world.resets)
        if policy == "none":
            assert not any(reset.complete for reset in world.resets)
    assert resets > NUM_SEEDS
    assert (hits > 0) == (policy != "none")


def hits_of(config: SimulationConfig, reset_before: int) -> list[int]:
    """What each request found, of which one comes after a reset."""
    world = Simulation(config, seed=1)
    ask = world.ask

    def asked(request_id: str, client: object) -> None:
        if len(world.clients) == reset_before:
            world.reset_prefix_caches()
        ask(request_id, client)  # type: ignore[arg-type]

    world.ask = asked  # type: ignore[method-assign]
    world.run()
    assert [reset.complete for reset in world.resets] == [True] * (reset_before > 0)
    records = [world.router.record(name) for name in world.clients]
    found = [record.generations[-1].hit_tokens for record in records if record is not None]
    return [tokens for tokens in found if tokens is not None]


def test_who_comes_after_a_reset_finds_nothing_in_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = replace(AGAIN, tiers=(SimulatedTier(shared=True),))
    assert hits_of(tiered, 2) == [0, 36, 0, 36]
    monkeypatch.setattr(TierClearing, "begin", lambda self: None)
    assert hits_of(tiered, 2) == [0, 36, 36, 36]  # control: tiers that forget nothing


def test_faults_and_resets_with_tiers() -> None:
    loads = resets = 0
    for seed in range(NUM_SEEDS):
        tier = SimulatedTier(shared=True, losses_per_mille=50, stalls_per_mille=10)
        config = SimulationConfig(
            LAYOUTS["hybrid"],
            roles=("prefill", "decode", "both"),
            num_blocks=60,
            num_requests=30,
            continued_per_mille=700,
            num_kills=2,
            num_cancels=3,
            num_resets=4,
            tiers=(tier,),
        )
        world = Simulation(config, seed)
        world.run()
        cores = [worker.core for worker in world.workers.values()]
        loads += sum(core.counters.counts.get("tier_loads", 0) for core in cores)
        resets += sum(reset.complete for reset in world.resets)
    assert loads
    assert resets > NUM_SEEDS


def test_who_comes_after_a_reset_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hits_of(AGAIN, -1) == [0, 36, 36, 36]
    assert hits_of(AGAIN, 2) == [0, 36, 0, 36]
    assert hits_of(replace(AGAIN, cache_policy=POLICIES["none"]), -1) == [0, 0, 0, 0]
    monkeypatch.setattr(KVCacheCoordinator, "forget_prefixes", lambda _: 0)
    assert hits_of(AGAIN, 2) == [0, 36, 36, 36]  # control: a reset that forgets nothing
