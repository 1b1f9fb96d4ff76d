"""Who gets the tokens of a step: the oldest prompt at least half, and everybody else in turn."""

import random
from collections.abc import Iterator

import pytest

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.messages.identity import RequestKey
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.step import Step
from disagg.testing.simulation.config import PlannedRequest
from disagg.testing.simulation.simulation import Simulation
from tests.unit.scheduling.long_worlds import (
    HOUR_MS,
    LONG_TOKENS,
    MINUTE_MS,
    hour_long,
    outcomes,
    play,
    prompt,
)
from tests.unit.scheduling.test_block_tables import new_core, result_of, submit

LAYOUT = plan_layout([FullAttentionSpec(4, 1, 8, 4)])
STATES = {
    size: plan_layout([FullAttentionSpec(size, 1, 8, 4), LinearStateSpec(size, 32 * size)])
    for size in (8, 16, 32)
}
"""Chunks end at multiples of so many tokens, where a step reaches one."""


def core_of(max_step_tokens: int, layout: KVCacheLayout = LAYOUT) -> WorkerCore:
    return new_core(layout, 2_000, max_step_tokens, max_sequences=16)


def ask(core: WorkerCore, name: str, num_tokens: int, seed: int = 0) -> None:
    submit(core, RequestKey(name, 1), prompt(num_tokens, seed), 1)


def steps_of(core: WorkerCore) -> Iterator[dict[str, int]]:
    """Tokens of each request in every step, until there is nothing to compute."""
    while (step := core.next_step(0)[0]) is not None:
        yield tokens_of(step)
        core.on_step_done(0, result_of(step, random.Random(0), fails=False))


def tokens_of(step: Step) -> dict[str, int]:
    return {part.key.request_id: len(part.token_ids) for part in step.slices}


def test_the_oldest_prompt_leaves_half_of_a_step_to_the_others_in_turn() -> None:
    core = core_of(16)
    for number, name in enumerate("abc"):
        ask(core, name, 40, number)
    ask(core, "short", 3, 9)
    steps = steps_of(core)
    assert next(steps) == {"a": 8, "b": 8}
    assert next(steps) == {"a": 8, "c": 8}
    assert next(steps) == {"a": 8, "short": 3, "b": 5}
    assert next(steps) == {"a": 8, "c": 8}
    assert next(steps) == {"a": 8, "b": 8}
    assert next(steps) == {"b": 8, "c": 8}, "b is the oldest now"


def test_what_the_others_do_not_need_is_the_oldests() -> None:
    core = core_of(16)
    ask(core, "long", 60)
    ask(core, "short", 3, 1)
    assert list(steps_of(core)) == [{"long": 13, "short": 3}, *({"long": 16},) * 2, {"long": 15}]


def test_short_prompts_are_computed_in_order_of_arrival() -> None:
    core = core_of(16)
    for number in range(5):
        ask(core, str(number), 5, number)
    assert list(steps_of(core)) == [{"0": 5, "1": 5, "2": 5, "3": 1}, {"3": 4, "4": 5}]


def test_one_token_is_the_oldests() -> None:
    core = core_of(1)
    ask(core, "long", 6)
    ask(core, "short", 2, 1)
    assert list(steps_of(core)) == [{"long": 1}] * 6 + [{"short": 1}] * 2


def steps_alone(core: WorkerCore, seq: Sequence, budget: int) -> int:
    """That the rest of a prompt would take if nobody shared them."""
    at, num_steps = seq.num_computed, 0
    while at < seq.num_tokens:
        end = core.kv.chunking.chunk_end(seq.request, seq.known_end, at, budget)
        at = end or min(at + budget, seq.num_tokens)
        num_steps += 1
    return num_steps


def waits(seed: int, layout: KVCacheLayout = LAYOUT) -> tuple[int, float]:
    """Random prompts: how long somebody was not served, and the latest completion.

    The former in steps beyond the number of prompts that ran meanwhile; the latter in steps that
    those before it and it would take one after the other.
    """
    rng = random.Random(seed)
    budget = rng.randint(20, 40)
    core = core_of(budget, layout)
    asked: list[tuple[str, int]] = []
    unserved: dict[str, int] = {}
    crowd: dict[str, int] = {}
    """Most prompts that ran while it was not served."""
    alone: dict[str, int] = {}
    taken: dict[str, int] = {}
    longest, latest = -budget, 0.0

    def arrive() -> None:
        name, num_tokens = str(len(asked)), rng.choice((5, 20, 90, 400))
        asked.append((name, num_tokens))
        ask(core, name, num_tokens, len(asked))
        before = [core.sequences[RequestKey(one, 1)] for one in (*taken, name)]
        alone[name] = sum(steps_alone(core, seq, budget) for seq in before)
        taken[name] = 0

    arrive()
    for tokens in steps_of(core):
        prompts = [seq for seq in core.batcher.running if seq.num_uncomputed > 1]
        for name in list(taken):
            taken[name] += 1
            seq = core.sequences[RequestKey(name, 1)]
            if name in tokens or seq not in prompts:
                unserved[name] = crowd[name] = 0
            else:
                unserved[name] = unserved.get(name, 0) + 1
                crowd[name] = max(crowd.get(name, 0), len(prompts))
                longest = max(longest, unserved[name] - crowd[name])
            if tokens.get(name, 0) == seq.num_uncomputed:
                latest = max(latest, taken.pop(name) / alone[name])
        if len(asked) < 40 and rng.random() < 0.3:
            arrive()
    assert not core.sequences
    return longest, latest


@pytest.mark.parametrize("layout", [LAYOUT, *STATES.values()], ids=["full", *map(str, STATES)])
@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_longer_than_the_rule_says(seed: int, layout: KVCacheLayout) -> None:
    longest, latest = waits(seed, layout)
    assert longest < 0
    assert latest <= 2


def share_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """Each prompt gets what those before it leave."""

    def by_arrival(self: Batcher, budget: int) -> list[tuple[Sequence, int]]:
        shares = []
        for seq in sorted(self.running, key=lambda seq: seq.arrival):
            if seq.num_unscheduled > 1 and budget:
                num_new = min(seq.num_unscheduled, budget)
                shares.append((seq, num_new))
                budget -= num_new
        return shares

    patch.setattr(Batcher, "_share_among_prompts", by_arrival)


def test_control_by_arrival_alone_somebody_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    share_by_arrival(monkeypatch)
    assert max(waits(seed)[0] for seed in range(20)) > 0


def behind_a_long_one() -> Simulation:
    """One worker, a prefill of an hour, and a short prompt every five minutes."""
    long = PlannedRequest(prompt(LONG_TOKENS), 3, at_ms=2_000)
    shorts = tuple(
        PlannedRequest(prompt(40, 1 + number), 3, at_ms=(2 + 5 * number) * MINUTE_MS)
        for number in range(10)
    )
    return play(hour_long("hybrid", roles=("both",), num_blocks=200, script=(long, *shorts)))


def test_short_prompts_do_not_wait_for_an_hour_behind_a_long_one() -> None:
    world = behind_a_long_one()
    assert outcomes(world) == {"finished": 11}
    clients = [client for client in world.clients.values() if len(client.prompt) == 40]
    longest = max(client.ended_ms - client.asked_ms for client in clients)
    assert longest < 10 * MINUTE_MS
    assert world.clients["r0"].ended_ms > HOUR_MS


def test_control_by_arrival_alone_they_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    share_by_arrival(monkeypatch)
    assert outcomes(behind_a_long_one())["timeout"]
