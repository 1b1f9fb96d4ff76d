"""The simulated worlds of other tests, with drafts: the tokens are those without.

Few tokens are in use, so that they come again and drafts are right at times. Worlds with linear
states stay as they are.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from disagg.kv.kinds.kind import keeps_states
from disagg.messages.sampling import SampledToken
from disagg.scheduling import step_side
from disagg.scheduling.drafts import accepted
from disagg.scheduling.step import SequenceSlice
from disagg.testing.simulation.config import FaultKind, PlannedRequest, SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.simulation.symbolic_engine import expected_tokens
from tests.unit.scheduling import failure_worlds
from tests.unit.scheduling import test_cache_worlds as caches
from tests.unit.scheduling import test_simulation as worlds
from tests.unit.scheduling import test_unequal_workers as unequal
from tests.unit.scheduling.tiers import test_simulated_tiers as tiers

NUM_SEEDS = 2
VOCAB_SIZE, ANSWER_TOKENS = 3, 30


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Simulation]:
    """Every world that is played drafts; those that were."""
    found: list[Simulation] = []
    begin = Simulation.__init__

    def with_drafts(self: Simulation, config: SimulationConfig, seed: int) -> None:
        assert not any(keeps_states(group.spec) for group in config.layout.groups)
        drafting = replace(
            config,
            num_speculative_tokens=4,
            vocab_size=VOCAB_SIZE,
            output_tokens_max=max(config.output_tokens_max, ANSWER_TOKENS),
        )
        begin(self, drafting, seed)
        found.append(self)

    monkeypatch.setattr(Simulation, "__init__", with_drafts)
    for module in (caches, worlds, unequal, tiers):
        monkeypatch.setattr(module, "NUM_SEEDS", NUM_SEEDS)
    return found


def check_drafts(played: list[Simulation]) -> None:
    total: Counter[str] = Counter()
    for world in played:
        for worker in world.workers.values():
            total += Counter(worker.core.counters.counts)
    assert 0 < total["accepted_draft_tokens"] < total["draft_tokens"], total


WORLDS: dict[str, Callable[[], object]] = {
    "calm": lambda: worlds.test_calm_world_hands_over_and_is_exact("hybrid", 0),
    "windows": lambda: worlds.test_calm_world_hands_over_and_is_exact("all_window", 0),
    "little memory": lambda: worlds.test_two_workers_prefill_for_each_other_in_little_memory(0),
    "faults": lambda: worlds.test_kills_cuts_cancels_read_errors("hybrid", 0),
    "next turns": lambda: worlds.test_the_next_turn_pulls_its_history("hybrid"),
    "wild pulls": lambda: worlds.test_pulls_from_anybody("full", 60, 0),
    "wild pulls of windows": lambda: worlds.test_pulls_from_anybody("all_window", 200, 0),
    "take-overs": worlds.test_decode_workers_that_die_are_replaced_at_the_lease,
    "expired leases": lambda: Simulation(worlds.FAULTY, 1).run(),
    "slow steps": lambda: Simulation(worlds.SLOW_STEPS, 1).run(),
    "unequal": lambda: unequal.test_every_hand_over_is_exact("hybrid", (4, 8)),
    "unequal chunks": lambda: unequal.test_whatever_befalls_them("chunks", 90),
    "unequal latents": lambda: unequal.test_whatever_befalls_them("latents", 90),
    "sparse cache": lambda: caches.test_faults_and_resets_under_every_policy("sparse", "hybrid"),
    "tiers and resets": caches.test_faults_and_resets_with_tiers,
    "tiers": lambda: tiers.test_a_calm_world_loads_what_it_wrote("window_full", "publish"),
    "tiers lose": lambda: tiers.test_tiers_that_lose_blocks_or_stand_still_cost_no_token("full"),
    "tiers lend": lambda: [tiers.play(tiers.LENDING)],
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_exact_with_drafts(name: str, played: list[Simulation]) -> None:
    WORLDS[name]()
    check_drafts(played)


@pytest.mark.parametrize("name", ["full", "window_full", "chunks_window_mla"])
def test_a_fault_before_an_event_costs_no_token(name: str, played: list[Simulation]) -> None:
    """Fail-over, take-over, preemption, cut links, before some events of two turns."""
    layout, first = failure_worlds.LAYOUTS[name], tuple(range(21))
    answer = tuple(expected_tokens(layout, first, ANSWER_TOKENS, VOCAB_SIZE))
    script = (PlannedRequest(first, ANSWER_TOKENS), PlannedRequest((*first, *answer, 7), 9))
    config = replace(failure_worlds.two_turns(layout), script=script)
    num_events = failure_worlds.play(config).num_events
    for offset, fault in enumerate(failure_worlds.PAIR_FAULTS):
        for event in range(1 + offset, num_events, 11):
            world = failure_worlds.play(failure_worlds.with_fault(config, event, fault))
            ends = {"finished", "cancelled"} if fault[0] is FaultKind.CANCEL else {"finished"}
            assert set(failure_worlds.outcomes(world)) <= ends
    check_drafts(played)


def test_control_one_draft_too_many_is_found(
    played: list[Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_more(
        part: SequenceSlice, first: SampledToken, after: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        return (first, *after)[: len(accepted(part, first, after)) + 1]

    WORLDS["calm"]()
    monkeypatch.setattr(step_side, "accepted", one_more)
    with pytest.raises(AssertionError):
        WORLDS["calm"]()
