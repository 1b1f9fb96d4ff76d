"""Whole worlds in which bits flip on their way: with checksums no token is wrong."""

from dataclasses import replace

import pytest

from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from tests.unit.scheduling.test_simulation import LAYOUTS, NUM_SEEDS

FLIPPING = SimulationConfig(
    LAYOUTS["hybrid"],
    roles=("prefill", "decode", "both"),
    num_blocks=120,
    num_requests=30,
    continued_per_mille=500,
    checksums=True,
    bit_flips_per_mille=20,
    replans_max=20,
)


def num_mismatches(world: Simulation) -> int:
    """Seen by the workers that live at the end."""
    return sum(worker.core.inbound.num_mismatches for worker in world.workers.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bits_are_seen_and_every_answer_is_exact(layout: str) -> None:
    num_flips = 0
    for seed in range(NUM_SEEDS):
        world = Simulation(replace(FLIPPING, layout=LAYOUTS[layout]), seed)
        world.run()  # it compares every token
        outcomes = {client.outcome for client in world.clients.values()}
        assert outcomes == {"finished"}, (seed, outcomes)
        # Of READs that fail for other reasons, or whose transfer is over, nothing is compared.
        assert (world.num_flips > 0) == (num_mismatches(world) > 0), seed
        assert num_mismatches(world) <= world.num_flips
        num_flips += world.num_flips
    assert num_flips > NUM_SEEDS // 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_checksums_they_are_not_seen(layout: str) -> None:
    """Control: the same worlds give wrong tokens."""
    config = replace(FLIPPING, layout=LAYOUTS[layout], checksums=False)
    num_wrong = 0
    for seed in range(NUM_SEEDS):
        try:
            Simulation(config, seed).run()
        except AssertionError:
            num_wrong += 1
    assert num_wrong, "a flipped bit changed nothing"


@pytest.mark.parametrize("layout", ["hybrid", "states"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_with_kills_cuts_cancels_and_read_errors(layout: str, seed: int) -> None:
    config = replace(
        FLIPPING,
        layout=LAYOUTS[layout],
        num_kills=4,
        num_cuts=4,
        num_cancels=5,
        read_errors_per_mille=50,
        lease_ttl_ms=40,
        wild_pulls_per_mille=300,
    )
    Simulation(config, seed).run()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_checksum_differs_where_no_bit_flips(seed: int) -> None:
    world = Simulation(replace(FLIPPING, bit_flips_per_mille=0), seed)
    world.run()
    assert world.num_handovers > 10
    assert not num_mismatches(world)
