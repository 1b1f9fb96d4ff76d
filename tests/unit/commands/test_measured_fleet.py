"""What a running fleet is asked, and in which order."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest

from disagg.commands.fleet_requests import Asked, FleetWorker, Measured, RunningFleet
from disagg.commands.measured_fleet import (
    PROMPT_TOKENS,
    REST_S,
    AskShape,
    Workers,
    ask_fleet,
    ask_shapes,
    check_alike,
    check_roles,
    middle,
)
from disagg.errors import ConfigError, RemoteFault
from tests.unit.commands.test_fitted_fleet import engine, settings


class Recorded:
    """In the place of a fleet: keeps what it is asked."""

    def __init__(self, *workers: Workers) -> None:
        self.asked: list[tuple[Sequence[Sequence[int]], int]] = []
        self._workers = list(workers)

    def wait_until_idle(self) -> Workers:
        """It is; the workers are those of the next time, at last for ever the same."""
        if len(self._workers) > 1:
            return self._workers.pop(0)
        return self._workers[0] if self._workers else frozenset()

    def ask_at_once(self, prompts: Sequence[Sequence[int]], beside: int = 0) -> list[Asked]:
        self.asked.append((prompts, beside))
        return [Asked(1.0 + len(self.asked), 1.0)]


def asked_of(
    shape: AskShape, repeats: int, monkeypatch: pytest.MonkeyPatch, *, is_warm: bool
) -> list[tuple[Sequence[Sequence[int]], int]]:
    waits: list[float] = []
    monkeypatch.setattr("disagg.commands.measured_fleet.time.sleep", waits.append)
    fleet = Recorded()
    ask_fleet([shape], cast("RunningFleet", fleet), repeats, lambda _: None, is_warm=is_warm)
    assert waits == [REST_S] * (len(fleet.asked) + 1), "a fleet at rest is asked, and left"
    return fleet.asked


def test_a_prompt_behind_a_prefix_begins_with_what_was_asked_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asked_of(AskShape(48, num_prefix=96), 2, monkeypatch, is_warm=True)
    prompts = [prompt for (prompt,), _ in asked]
    assert len(prompts) == 4
    for prefix, whole in ((prompts[0], prompts[1]), (prompts[2], prompts[3])):
        assert whole[: len(prefix)] == prefix
        assert len(prefix) == 96
        assert 40 <= len(whole) - len(prefix) <= 56
    assert prompts[0] != prompts[2]


def test_a_fleet_that_is_warm_gets_no_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_warm, num in ((True, 3), (False, 4)):
        asked = asked_of(AskShape(48, 2, 1), 3, monkeypatch, is_warm=is_warm)
        assert [(len(prompts), beside) for prompts, beside in asked] == [(2, 1)] * num


def test_nobody_is_asked_beside_others_where_a_host_has_one_worker() -> None:
    assert not any(one.beside for one in ask_shapes(engine(1), settings()))
    for num in (2, 8):
        beside = [one for one in ask_shapes(engine(num), settings()) if one.beside]
        assert [(one.beside, one.num_prompt) for one in beside] == [(1, 48), (1, 240), (1, 960)]


def test_a_model_of_few_tokens_is_asked_for_no_more_than_half_of_them() -> None:
    tiny = replace(engine(2), max_model_tokens=512)
    assert max(one.num_prompt for one in ask_shapes(tiny, settings())) == 240
    assert max(one.num_prefix for one in ask_shapes(tiny, settings())) == 256
    tiny = replace(engine(2), max_model_tokens=128)
    assert {one.num_prompt for one in ask_shapes(tiny, settings())} == {PROMPT_TOKENS, 64}


def test_the_middle_of_rounds() -> None:
    rounds = [Asked(1, 9, 5, 3, 16, 7), Asked(2, 7, None, 4, 32), Asked(90, 8, 6, 5, 32, 9)]
    assert middle(rounds) == Asked(2, 8, 5.5, 4, 32, 8)
    assert middle([Asked(1, 1)]) == Asked(1, 1)


OURS = Measured("f", "float32", "paged", 1, (16, 16), 4_096, 64)
P, D = (FleetWorker(role, "1", role, True, OURS) for role in ("prefill", "decode"))
BOTH = frozenset((P, D))


@pytest.mark.parametrize(
    ("later", "named"),
    [
        (BOTH - {D}, "decode"),
        (BOTH - {D} | {D._replace(epoch="2")}, "decode"),
        (BOTH - {P} | {P._replace(ready=False)}, "prefill"),
        (BOTH | {P._replace(worker_id="new")}, "new"),
    ],
)
@pytest.mark.parametrize("num_before", [1, 3])
def test_a_fleet_that_changes_meanwhile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, later: Workers, named: str, num_before: int
) -> None:
    """Before the first request, and after the last one."""
    monkeypatch.setattr("disagg.commands.measured_fleet.time.sleep", lambda _: None)
    fleet = cast("RunningFleet", Recorded(*[BOTH] * num_before, later))
    with pytest.raises(RemoteFault, match=f"the fleet has changed meanwhile: {named};"):
        ask_fleet([AskShape(48)], fleet, 2, lambda _: None, is_warm=True)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (BOTH, ""),
        (frozenset(), ""),
        (BOTH | {D._replace(worker_id="d2")}, "the settings have 1P1D, the fleet 1P2D"),
        (frozenset({P}), "the settings have 1P1D, the fleet 1P"),
        (frozenset({P._replace(ready=False)}), "the fleet no worker that is ready"),
    ],
)
def test_the_fleet_is_the_one_of_the_settings(workers: Workers, said: str) -> None:
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_roles(workers, settings(disaggregated=True))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fingerprint": "g"}, "--model: decode of the fleet serves another checkpoint"),
        ({"dtype": "bfloat16"}, "worker.dtype, worker.kv_dtype: bfloat16 at decode"),
        ({"page_format": "vllm"}, "worker.engine: vllm at decode of the fleet, paged by the sett"),
        ({"num_ranks": 2}, "worker.tensor_parallel: 2 at decode"),
        ({"block_tokens": (32, 32)}, "worker.block_tokens: 32, 32 at decode of the fleet, 16, 16"),
        (
            {"max_model_tokens": 512},
            "scheduling.max_model_tokens: 512 at decode of the fleet, 4096",
        ),
        ({"max_sequences": 8}, "scheduling.max_sequences: 8 at decode of the fleet, 64"),
    ],
)
def test_the_fleet_is_of_the_worker_that_is_measured(changed: dict[str, Any], said: str) -> None:
    """Or its curves would be made of two workers' times, and nothing would say so."""
    check_alike(BOTH, OURS)
    check_alike(frozenset(), OURS._replace(**changed))
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_alike(BOTH - {D} | {D._replace(measured=OURS._replace(**changed))}, OURS)
