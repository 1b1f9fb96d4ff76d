"""Whole worlds with tiers: exact tokens, nothing held, whatever a tier loses; and broken rules."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import WHOLE, TierStored
from disagg.routing.index import PrefixIndex
from disagg.scheduling.tiers.copies import Copies, Copy, KeyedBlocks
from disagg.scheduling.tiers.index import TierIndex
from disagg.scheduling.tiers.lending import TierLending
from disagg.scheduling.tiers.loads import TierLoad, TierLoads
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.simulation.symbolic_tier import SimulatedTier
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.test_simulation import NUM_SEEDS, breaks

HYBRID = LAYOUTS["window_full"]
HOST = SimulatedTier()
CALM = SimulationConfig(
    HYBRID,
    roles=("both", "both"),
    num_blocks=70,
    num_requests=40,
    continued_per_mille=600,
    tiers=(HOST,),
)
POLICIES = ("publish", "eviction", "reuse")


def counts(world: Simulation) -> Counter[str]:
    """The counters of all workers that live, added up."""
    total: Counter[str] = Counter()
    for worker in world.workers.values():
        total.update(worker.core.counters.counts)
    return total


def play(config: SimulationConfig) -> Counter[str]:
    """Some seeds of a world; what its workers counted in all of them."""
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = Simulation(config, seed)
        world.run()
        total += counts(world)
    return total


def holds(index: PrefixIndex, worker: Incarnation, tier: int, group: int, value: bytes) -> bool:
    """Whether a tier of a worker has a block, by the index."""
    found = index._stores[index._groups[group].block_tokens].find(value)
    if found is None:
        return False
    chain, offset = found
    runs = chain.layers[index._layer(tier + 1, group)]
    return runs is not None and bool(
        runs.between(offset, offset + 1)[1][0] & index._members[worker].bit
    )


def check_index(config: SimulationConfig) -> int:
    """In the end the router knows the tiers as the workers do; returns how many blocks."""
    num_known = 0
    for seed in range(NUM_SEEDS):
        world = Simulation(config, seed)
        world.run()
        fleet = world.router._fleet
        for worker in world.workers.values():
            if not worker.alive or worker.me not in fleet:
                continue
            log, first = worker.core.kv.events, world.router.kv_sequence(worker.me)
            batch = log.since(first)
            stored = batch.events if batch else log.snapshot().tiers
            at = first if batch else log.next_seq
            world.router.kv_events(worker.me, worker.me.epoch, at, None if batch else WHOLE, stored)
            (index,) = fleet._indexes.values()
            tiers = [set(one) for one in worker.core.tiers.index._keys]
            known = index._members[worker.me].num_keys[1:]
            assert known == list(map(len, tiers)), f"seed {seed}"
            for number, keys in enumerate(tiers):
                assert all(holds(index, worker.me, number, *key) for key in keys), f"seed {seed}"
            num_known += sum(map(len, tiers))
    return num_known


def test_the_router_knows_what_tiers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = SimulatedTier(blocks_max=60, losses_per_mille=50)
    config = replace(CALM, num_kills=2, num_resets=1, tiers=(tier, replace(tier, name="disk")))
    assert check_index(config)
    told = TierIndex._tell

    def tell(self: TierIndex, kind: Any, tier: int, keys: Any) -> None:
        if kind is TierStored:
            told(self, kind, tier, keys)

    monkeypatch.setattr(TierIndex, "_tell", tell)
    with pytest.raises(AssertionError, match="seed"):
        check_index(config)  # control: what tiers lose is not told


@pytest.mark.parametrize("write", POLICIES)
@pytest.mark.parametrize("layout", ["window_full", "states_window_full", "chunks_full", "full"])
def test_a_calm_world_loads_what_it_wrote(layout: str, write: str) -> None:
    tier = replace(HOST, write=write)  # type: ignore[arg-type]
    blocks = {"full": 30, "states_window_full": 100, "chunks_full": 50}.get(layout, 70)
    config = replace(CALM, layout=LAYOUTS[layout], num_blocks=blocks, tiers=(tier,))
    total = play(config)
    assert total["tier_blocks_read_host"] > 0
    assert total["tier_loads"] > 0
    lost = ("tier_loads_failed", "tier_blocks_missed_host", "tier_blocks_refused_host")
    assert not any(total[name] for name in lost), total


FAULTY = replace(
    CALM,
    roles=("prefill", "decode", "both"),
    num_requests=60,
    num_kills=3,
    num_cuts=3,
    num_cancels=12,
    wild_pulls_per_mille=300,
    read_errors_per_mille=50,
    tiers=(
        replace(HOST, blocks_max=60, losses_per_mille=80, stalls_per_mille=100),
        replace(HOST, name="disk", write="eviction", shared=True, losses_per_mille=80),
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiers_that_lose_blocks_or_stand_still_cost_no_token(layout: str) -> None:
    total = play(replace(FAULTY, layout=LAYOUTS[layout]))
    assert total["tier_blocks_written_host"] > 0
    assert total["tier_blocks_refused_host"] > 0


def test_of_two_tiers_both_are_used_and_what_is_lost_is_counted() -> None:
    total = play(FAULTY)
    for name in ("host", "disk"):
        assert total[f"tier_blocks_read_{name}"] > 0
        assert total[f"tier_blocks_missed_{name}"] > 0
    assert total["tier_loads_failed"] > 0
    assert total["tier_reads_given_up"] > 0


LENDING = replace(
    CALM,
    roles=("both", "both", "both"),
    num_requests=120,
    num_blocks=60,
    num_kills=3,
    wild_pulls_per_mille=900,
    tiers=(replace(HOST, losses_per_mille=30),),
)


def test_what_others_pull_is_loaded_and_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    total = play(LENDING)
    assert total["tier_prefixes_loaded_to_lend"] > 0
    assert total["prefix_pulls_committed"] > 0
    monkeypatch.setattr(TierLending, "_is_whole", lambda self, message: False)
    assert play(LENDING)["prefix_pulls_committed"] < total["prefix_pulls_committed"]  # control


def test_a_worker_that_returns_finds_its_tier_again() -> None:
    loaded = 0
    for seed in range(NUM_SEEDS):
        world = Simulation(replace(CALM, num_blocks=200, num_kills=4, arrivals_ms=4_000), seed)
        world.run()
        loaded += counts(world)["tier_loads"]
        without = Simulation(replace(world.config, tiers=()), seed)
        without.run()
        assert not counts(without)["tier_loads"]
    assert loaded > 0, "in a pool that evicts nothing"


def test_hand_overs_load_at_the_prefill_worker_and_prefetch_at_the_decode_worker() -> None:
    config = replace(CALM, roles=("prefill", "decode"), num_blocks=60, handover_share_max=1.0)
    found: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = Simulation(config, seed)
        world.run()
        assert {client.outcome for client in world.clients.values()} == {"finished"}
        assert world.num_handovers > 10
        for name, what in (("w0", "tier_loads"), ("w1", "tier_prefetches")):
            found[name] += world.workers[name].core.counters.counts.get(what, 0)
    assert found["w0"] > 0
    assert found["w1"] > 0


# --- each rule taken away


def hold_nothing(direction: bool) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        begin = Copies.begin

        def careless(
            self: Copies,
            now_ms: int,
            tier: int,
            blocks: KeyedBlocks,
            *,
            writes: bool,
            evict_first: bool = False,
        ) -> Copy:
            copy = begin(self, now_ms, tier, blocks, writes=writes, evict_first=evict_first)
            if writes == direction:
                self._pool.drop(copy.holder)
            return copy

        patch.setattr(Copies, "begin", careless)

    return mutate


def believe_the_tier(patch: pytest.MonkeyPatch) -> None:
    """What a tier could not bring whole counts all the same."""
    on_read = TierLoads.on_read

    def blind(self: TierLoads, now_ms: int, copy_id: int, intact: Collection[bool]) -> None:
        on_read(self, now_ms, copy_id, [True] * len(intact))

    patch.setattr(TierLoads, "on_read", blind)


def do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A load counts when its first copy has ended."""
    conclude = TierLoads._conclude

    def hasty(self: TierLoads, now_ms: int, load: TierLoad) -> None:
        if len(load.missing) < sum(map(len, load.reservation.lacks)):
            load.missing.clear()
        conclude(self, now_ms, load)

    patch.setattr(TierLoads, "_conclude", hasty)


SCARCE = replace(
    CALM,
    num_blocks=44,
    num_requests=80,
    num_cancels=60,
    tiers=(replace(HOST, copy_ms_max=150, losses_per_mille=100),),
)


@pytest.mark.parametrize(
    "mutate",
    [hold_nothing(True), hold_nothing(False), believe_the_tier, do_not_wait],
    ids=["writes", "reads", "intact", "wait"],
)
def test_a_broken_rule_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        Simulation(SCARCE, seed).run()
    mutate(monkeypatch)
    assert any(breaks(SCARCE, seed) for seed in range(40))
