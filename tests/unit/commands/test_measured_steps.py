"""Steps that `disagg calibrate` measures, with an engine that takes no time."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.commands.measured_steps import StepRig
from disagg.errors import ConfigError
from disagg.messages.sampling import SampledToken
from disagg.scheduling.engine_steps import EngineSteps
from disagg.scheduling.step import Step
from tests.unit.simulation.fleets import layout, limits


def rig(num_blocks: int, **changed: Any) -> StepRig:
    """Of a worker with so many blocks of 16 tokens, for two groups."""

    def compute(tables: Any, step: Step) -> list[Any]:
        return [SampledToken(5) if part.sampling else None for part in step.slices]

    steps = EngineSteps(lambda step: {}, compute, ())
    engine: Any = SimpleNamespace(
        layout=layout(),
        region=SimpleNamespace(num_blocks=num_blocks),
        prepare=steps.prepare,
        run=steps.run,
    )
    small = replace(limits(), max_model_tokens=2_048, max_step_tokens=128, max_sequences=8)
    return StepRig(engine, replace(small, **changed), 2, lambda text: None)


@pytest.mark.parametrize(("num_blocks", "num_derived"), [(4_000, 0), (500, 1), (250, 2)])
def test_batches_that_do_not_fit_the_pool_are_derived(num_blocks: int, num_derived: int) -> None:
    one = rig(num_blocks)
    one.warm_up()
    surface, derived = one.decode_surface()
    assert (surface.across, surface.along) == ((1, 2, 4, 8), (64, 1_024))
    assert derived == num_derived
    assert all(surface.at(num, 1_024) > 0 for num in surface.across)
    one._core.kv.check()


def test_a_pool_too_small_for_all_sequences_is_said_so() -> None:
    with pytest.raises(ConfigError, match=r"sequences .* do not fit the pool of 19 blocks") as said:
        rig(20).warm_up()
    assert said.value.param == "worker.num_blocks"


def test_a_pool_of_one_sequence() -> None:
    """As it is by itself where one runs at a time: the window's blocks leave no room for one of
    the model's length."""
    one = rig(2 + 2_048 // 16, max_sequences=1)
    one.warm_up()
    surface, _ = one.decode_surface()
    assert surface.across == (1,)


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"max_step_tokens": 4}, "max_sequences"), ({"max_model_tokens": 128}, "max_step_tokens")],
)
def test_settings_with_nothing_to_measure_are_named(changed: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduling.{name}.*: set ") as said:
        rig(4_000, **changed).warm_up()
    assert said.value.param == f"scheduling.{name}"


def test_steps_too_short_for_long_prompts_are_named() -> None:
    one = rig(4_000, max_step_tokens=8)
    one.warm_up()
    with pytest.raises(ConfigError, match=r"steps of 8 tokens \(scheduling.max_step_tokens\)"):
        one.decode_surface()
