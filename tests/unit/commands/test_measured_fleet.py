"""What a fleet adds to an engine's own times is found from what its requests took."""

import pytest

from disagg.commands.measured_fleet import Asked, long_prompt, simulated, with_serving
from disagg.config import read_settings
from disagg.config.settings import Settings
from disagg.config.sources import Given
from tests.unit.simulation.fleets import curves, fleet, with_curves

ADDED = {"request_ms": 17.0, "request_token_ms": 0.02, "step_more_ms": 3.0, "sequence_more_ms": 0.7}


def settings() -> Settings:
    given = {
        "cluster.num_both": 2,
        "cluster.num_prefill": 0,
        "cluster.num_decode": 0,
        "router.policy": "local",
        "scheduling.max_model_tokens": 8_192,
    }
    values = {name: Given(value, "test") for name, value in given.items()}
    return read_settings(None, {}, values).settings


def test_what_a_fleet_adds_is_found_again() -> None:
    real = with_curves(fleet(), **ADDED).curves
    alone, several = (simulated(real, settings(), num) for num in (1, 8))
    long = simulated(real, settings(), 1, long_prompt(real))
    found = with_serving(curves(), settings(), alone, several, long)
    for name, value in ADDED.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1), name
    assert simulated(curves(), settings(), 1).tpot_ms < alone.tpot_ms - 3, "control: without"


def test_a_fleet_that_is_faster_than_its_parts_adds_nothing() -> None:
    found = with_serving(curves(), settings(), *[Asked(0.1, 0.1)] * 3)
    assert {getattr(found, name) for name in ADDED} == {0}
