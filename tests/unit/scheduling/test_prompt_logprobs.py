"""Log-probabilities of prompts, over the whole system and its faults: each of them, and once."""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import PromptLogprobs, SequenceOutput, StepOutputs
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SampledToken, SamplingParams, TokenLogprobs
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import Role, Submit
from disagg.routing.prompt_scores import PromptScores
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.prompt_scores import step_outputs
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.step import Step, StepResult
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.simulation.worker_faults import preempt_youngest
from tests.unit.scheduling.test_preempted_prefill import LIMITS
from tests.unit.scheduling.test_simulation import LAYOUTS

NUM_SEEDS = int(os.environ.get("DISAGG_SIMULATION_SEEDS", "6"))
FAULTS = SimulationConfig(
    LAYOUTS["hybrid"],
    roles=("prefill", "decode", "both"),
    num_blocks=90,
    num_requests=30,
    num_kills=4,
    num_cuts=4,
    num_cancels=5,
    read_errors_per_mille=100,
    lease_ttl_ms=40,
    scored_per_mille=500,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calm_world(layout: str) -> None:
    for seed in range(NUM_SEEDS):
        config = SimulationConfig(
            LAYOUTS[layout], num_blocks=200, continued_per_mille=500, scored_per_mille=500
        )
        world = Simulation(config, seed)
        world.run()
        outcomes = Counter(client.outcome for client in world.clients.values())
        assert set(outcomes) == {"finished"}, (seed, outcomes)
        assert world.num_handovers > 3
        assert any(client.is_scored and not client.max_tokens for client in world.clients.values())


@pytest.mark.parametrize("layout", ["hybrid", "states"])
def test_kills_cuts_cancels_read_errors(layout: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = Simulation(replace(FAULTS, layout=LAYOUTS[layout]), seed)
        world.run()
        assert not is_wrong(world)
        for request_id, client in world.clients.items():
            record = world.router.record(request_id)
            if client.scores and record is not None and len(record.generations) > 1:
                found[client.outcome] += 1
    assert found["finished"], "no request that was planned anew was scored"


def test_little_memory_and_preemption() -> None:
    for seed in range(NUM_SEEDS):
        config = SimulationConfig(
            LAYOUTS["hybrid"],
            roles=("both", "both"),
            num_blocks=70,
            num_requests=30,
            scored_per_mille=700,
        )
        Simulation(config, seed).run()


def is_wrong(world: Simulation) -> bool:
    """Whether something ended a request that no fault explains."""
    wrong = ("protocol_error", "worker_unavailable: given up")
    return any(client.outcome.startswith(wrong) for client in world.clients.values())


def assert_found(config: SimulationConfig) -> None:
    for seed in range(4 * NUM_SEEDS):
        try:
            world = Simulation(config, seed)
            world.run()
        except AssertionError:
            return
        if is_wrong(world):
            return
    raise AssertionError("nothing was wrong")


def test_control_cached_prompts_have_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "num_cacheable", property(lambda self: self.num_tokens - 1))
    assert_found(replace(FAULTS, num_kills=0, num_cuts=0, continued_per_mille=500))


def test_control_tokens_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptScores, "complete", property(lambda self: True))
    assert_found(FAULTS)


def test_control_a_part_is_kept_when_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptScores, "restart", lambda self: None)
    assert_found(FAULTS)


# -- one worker


KEY = RequestKey("r", 1)
PROMPT = tuple(range(100, 110))


def score_at(position: int) -> TokenLogprobs:
    return TokenLogprobs(-float(position), ((position, 0.0),), 1)


def worker(max_step_tokens: int = 4) -> WorkerCore:
    layout = plan_layout([FullAttentionSpec(4, 1, 8, 4)])
    kv = KVCacheCoordinator(layout, 16, max_model_tokens=32, max_step_tokens=max_step_tokens)
    limits = replace(LIMITS, max_step_tokens=max_step_tokens)
    hasher = BlockHasher(b"key", 4)
    return WorkerCore(Incarnation("w", "e"), layout, kv, hasher, limits, lambda _: 1)


def submit(key: RequestKey = KEY, **sampling: Any) -> Submit:
    given: dict[str, Any] = {"num_prompt_logprobs": 1, "num_prompt_tokens": len(PROMPT)}
    return Submit(key, Role.LOCAL, PROMPT, (), b"", SamplingParams(2, **(given | sampling)))


def done(core: WorkerCore, step: Step) -> list[WorkerAction]:
    samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
    for part in step.slices:
        wanted = PROMPT[part.start + 1 :][: len(part.token_ids)]
        assert tuple(part.scored_token_ids) in ((), wanted)  # nothing where all was said
    scores = tuple(
        tuple(score_at(part.start + 1 + n) for n in range(len(part.scored_token_ids)))
        for part in step.slices
    )
    return core.on_step_done(0, StepResult(step.step_id, samples, prompt_logprobs=scores))


def said(actions: list[WorkerAction]) -> list[PromptLogprobs]:
    told = [one.message for one in actions if isinstance(one, ToRouter)]
    return [one for m in told if isinstance(m, StepOutputs) for one in m.prompt_logprobs]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_who_is_preempted_says_nothing_twice(num_steps: int) -> None:
    core = worker()
    core.on_router_message(0, submit())
    found: list[PromptLogprobs] = []
    starts = []
    preempted = False
    while core.sequences:
        step, _ = core.next_step(0)
        assert step is not None
        starts.append(step.slices[0].start)
        found += said(done(core, step))
        if len(starts) == num_steps + 1 and not preempted:
            preempted = True
            preempt_youngest(core)
            # What is cached may be used again as far as no more is wanted of it.
            assert core.sequences[KEY].num_cacheable == (4, 8, len(PROMPT))[num_steps]
    assert core.batcher.num_preemptions == 1
    assert starts[num_steps + 1] == (4, 8, 8)[num_steps]
    positions = [one.position + n for one in found for n in range(len(one.logprobs))]
    assert positions == list(range(1, len(PROMPT)))
    assert [entry for one in found for entry in one.logprobs] == [score_at(p) for p in positions]


def test_nothing_of_it_comes_from_the_cache_and_others_find_it() -> None:
    core = worker(16)
    scored, plain = dict[str, Any](), {"num_prompt_logprobs": None}
    for number, sampling in enumerate((scored, scored, plain), 1):
        core.on_router_message(0, submit(KEY._replace(generation=number), **sampling))
        hits = []
        while core.sequences:
            step, _ = core.next_step(0)
            assert step is not None
            actions = done_or_plain(core, step)
            wanted = sum(len(one.logprobs) for one in said(actions))
            hits += [
                one.message.hit_tokens
                for one in actions
                if isinstance(one, ToRouter) and isinstance(one.message, PrefillReport)
            ]
            assert wanted in (0, len(PROMPT) - 1)
        assert hits == [0 if number < 3 else 8]


def done_or_plain(core: WorkerCore, step: Step) -> list[WorkerAction]:
    if any(part.scored_token_ids for part in step.slices):
        return done(core, step)
    samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
    return core.on_step_done(0, StepResult(step.step_id, samples))


@pytest.mark.parametrize(
    "sampling",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 11},
        {"num_prompt_logprobs": None, "min_tokens": 1, "num_prompt_tokens": 0},
        {"min_tokens": 1, "grammar": "{}"},
    ],
)
def test_what_cannot_be_told_apart_is_rejected(sampling: dict[str, Any]) -> None:
    core = worker()
    actions = core.on_router_message(0, submit(**sampling))
    (ended,) = [one.message for one in actions if isinstance(one, ToRouter)]
    assert isinstance(ended, PartEnded)
    assert ended.reason is EndReason.REJECTED


@pytest.mark.parametrize("numbers_max", [1, 2, 3, 4, 7, 100])
def test_messages_are_bounded(numbers_max: int) -> None:
    other = RequestKey("s", 2)
    scored = [
        PromptLogprobs(KEY, 5, tuple(score_at(p) for p in range(5, 10))),
        PromptLogprobs(other, 1, tuple(score_at(p) for p in range(1, 3))),
    ]
    token = SequenceOutput(KEY, 10, (7,))
    messages = list(step_outputs([token], scored, numbers_max))
    sizes = [
        sum(1 + len(e.top) for one in m.prompt_logprobs for e in one.logprobs) for m in messages
    ]
    assert all(0 < size <= max(2, numbers_max) for size in sizes)
    assert [m.outputs for m in messages] == [()] * (len(messages) - 1) + [(token,)]
    for key, expected in ((KEY, range(5, 10)), (other, range(1, 3))):
        parts = [one for m in messages for one in m.prompt_logprobs if one.key == key]
        positions = [one.position + n for one in parts for n in range(len(one.logprobs))]
        assert positions == list(expected)
        assert [e for one in parts for e in one.logprobs] == [score_at(p) for p in expected]
    assert list(step_outputs([], [], numbers_max)) == []
