"""Router and worker cores together, over seeds and faults: exact tokens, nothing held."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, LeaseRequest, RequestKey
from disagg.messages.peer import Commit, CommitAnswer, Offers
from disagg.scheduling.handover.prefix_pull import PrefixPullSide
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.table_news import TableNews
from disagg.transfer.actions import LeaseListener, Send
from disagg.transfer.owner.lease import GroupBlocks
from disagg.transfer.owner.requests import LeaseAnswers
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.table import InboundTable
from disagg.transfer.reservation.requests import ReservationRequests

FULL = FullAttentionSpec(4, 1, 8, 4)
NUM_SEEDS = int(os.environ.get("DISAGG_SIMULATION_SEEDS", "4"))


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(4, 1, 8, 4, tokens)


HYBRID = plan_layout([window(8), window(8), FULL])
LAYOUTS = {
    "hybrid": HYBRID,
    "full": plan_layout([FULL]),
    "all_window": plan_layout([window(10), window(10)]),
    "states": plan_layout([LinearStateSpec(4, 300), LinearStateSpec(4, 300), FULL]),
}


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calm_world_hands_over_and_is_exact(layout: str, seed: int) -> None:
    world = Simulation(SimulationConfig(LAYOUTS[layout], num_blocks=200), seed)
    world.run()
    outcomes = {name: client.outcome for name, client in world.clients.items()}
    assert set(outcomes.values()) == {"finished"}, outcomes
    assert world.num_handovers > 10


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_two_workers_prefill_for_each_other_in_little_memory(seed: int) -> None:
    config = SimulationConfig(HYBRID, roles=("both", "both"), num_blocks=70, num_requests=30)
    world = Simulation(config, seed)
    world.run()
    outcomes = {name: client.outcome for name, client in world.clients.items()}
    assert set(outcomes.values()) == {"finished"}, outcomes


@pytest.mark.parametrize("layout", ["hybrid", "states"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_kills_cuts_cancels_read_errors(layout: str, seed: int) -> None:
    config = SimulationConfig(
        LAYOUTS[layout],
        roles=("prefill", "decode", "both"),
        num_blocks=90,
        num_requests=30,
        num_kills=4,
        num_cuts=4,
        num_cancels=5,
        read_errors_per_mille=100,
        lease_ttl_ms=40,
    )
    Simulation(config, seed).run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_turn_pulls_its_history(layout: str) -> None:
    num_pulls = 0
    for seed in range(NUM_SEEDS):
        config = SimulationConfig(LAYOUTS[layout], num_blocks=200, continued_per_mille=700)
        world = Simulation(config, seed)
        world.run()
        outcomes = {name: client.outcome for name, client in world.clients.items()}
        assert set(outcomes.values()) == {"finished"}, (seed, outcomes)
        num_pulls += world.num_pulls
    assert num_pulls > NUM_SEEDS


WILD = SimulationConfig(
    HYBRID,
    roles=("prefill", "decode", "both"),
    num_requests=40,
    continued_per_mille=700,
    wild_pulls_per_mille=600,
)
"""Prefills pull from anybody, whatever the router knows."""
WILD_FAULTS: dict[str, Any] = {
    "num_kills": 4,
    "num_cuts": 4,
    "num_cancels": 5,
    "read_errors_per_mille": 100,
    "lease_ttl_ms": 40,
}


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("num_blocks", [60, 200])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pulls_from_anybody(layout: str, num_blocks: int, seed: int) -> None:
    config = replace(WILD, layout=LAYOUTS[layout], num_blocks=num_blocks)
    Simulation(config, seed).run()
    Simulation(replace(config, **WILD_FAULTS), seed).run()


TAKES_OVER = SimulationConfig(
    HYBRID,
    roles=("prefill", "decode", "decode", "both"),
    num_blocks=60,
    num_requests=60,
    num_kills=6,
    num_cuts=6,
    read_ms_max=120,
    continued_per_mille=500,
    wild_pulls_per_mille=300,
)


def test_decode_workers_that_die_are_replaced_at_the_lease() -> None:
    planned = refused = 0
    for seed in range(2 * NUM_SEEDS):
        world = Simulation(TAKES_OVER, seed)
        world.run()
        planned += world.router.counters["plans", "take_over"]
        refused += world.router.counters["replans", "take_over_refused"]
    assert planned > refused, "some must succeed"


def test_expired_leases_are_counted_apart() -> None:
    config = SimulationConfig(HYBRID, read_ms_max=200, lease_ttl_ms=8)
    world = Simulation(config, 1)
    world.run()
    assert sum(w.core.counters.counts.get("leases_expired", 0) for w in world.workers.values())
    patient = Simulation(replace(config, lease_ttl_ms=60_000), 1)
    patient.run()
    assert not any("leases_expired" in w.core.counters.counts for w in patient.workers.values())


FAULTY = SimulationConfig(
    HYBRID,
    roles=("prefill", "decode", "both"),
    num_blocks=48,
    num_requests=40,
    read_ms_max=200,
    num_cuts=6,
    num_cancels=25,
    lease_ttl_ms=8,
)


SLOW_STEPS = replace(FAULTY, read_ms_max=5, step_ms_max=150, lease_ttl_ms=60_000)


def break_hold_until_terminal(patch: pytest.MonkeyPatch) -> None:
    """Destinations go back at the abort, while READs may still land."""
    abort = InboundTable.abort

    def careless(self: InboundTable, key: RequestKey) -> None:
        abort(self, key)
        pool = self.holds
        assert isinstance(pool, BlockPool)
        for holder in list(pool.holders()):
            if isinstance(holder, tuple) and holder[:2] == ("inbound", key):
                pool.drop(holder)

    patch.setattr(InboundTable, "abort", careless)


def forget_to_tell(patch: pytest.MonkeyPatch) -> None:
    """The news that a lease expired is lost; the commit must find out."""
    end = LeaseTable.expire

    def silent(self: LeaseTable, now_ms: int) -> None:
        out, self.out = self.out, TableNews()
        end(self, now_ms)
        self.out = out

    give_back = ReservationRequests.give_back

    def silently(self: ReservationRequests, key: RequestKey) -> list[Send]:
        give_back(self, key)
        return []

    patch.setattr(LeaseTable, "expire", silent)
    patch.setattr(ReservationRequests, "give_back", silently)


def break_commit(patch: pytest.MonkeyPatch) -> None:
    """The owner confirms whatever commit arrives."""

    def always(self: LeaseTable, sender: Incarnation, commit: Commit) -> None:
        answer = CommitAnswer(commit.key, commit.lease_id, commit.attempt, ok=True)
        self.out.add(Send(sender, answer))

    patch.setattr(LeaseTable, "on_commit", always)


def break_step_holds(patch: pytest.MonkeyPatch) -> None:
    """A step in flight holds nothing."""
    patch.setattr(KVCacheCoordinator, "hold_step", lambda self, step_id, keys: None)


def break_pulls_hold(patch: pytest.MonkeyPatch) -> None:
    """What is lent to a prefix pull is not held."""
    opened = LeaseAnswers.open_sealed

    def careless(
        self: LeaseAnswers,
        now_ms: int,
        request: LeaseRequest,
        blocks: GroupBlocks,
        num_tokens: int,
        listener: LeaseListener,
    ) -> None:
        opened(self, now_ms, request, blocks, num_tokens, listener)
        table = self._table
        (lease,) = [one for one in table._live.values() if one.request == request]
        table.holds.drop(lease.holder)
        table.holds.hold(lease.holder, ())

    patch.setattr(LeaseAnswers, "open_sealed", careless)


def break_prefix_commit(patch: pytest.MonkeyPatch) -> None:
    """A pulled prefix is published when its READs are posted."""
    granted = PrefixPullSide.lease_granted

    def hasty(self: PrefixPullSide, now_ms: int, owner: Incarnation, offers: Offers) -> None:
        granted(self, now_ms, owner, offers)
        pull = self.pulls.get(offers.key)
        if pull is not None:
            num_tokens = pull.reservation.num_external_tokens
            self._prefixes.publish_intact(pull.seq.request, num_tokens, ())

    patch.setattr(PrefixPullSide, "lease_granted", hasty)


PULLS = replace(
    WILD,
    num_blocks=48,
    num_requests=120,
    wild_pulls_per_mille=1_000,
    read_ms_max=200,
    num_cancels=40,
)
"""Blocks are scarce while they are read: one seed in three or four shows a missing hold."""


@pytest.mark.parametrize("mutate", [break_pulls_hold, break_prefix_commit])
def test_a_broken_rule_of_pulls_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        Simulation(PULLS, seed).run()
    mutate(monkeypatch)
    assert any(breaks(PULLS, seed) for seed in range(60))


def breaks(config: SimulationConfig, seed: int) -> bool:
    try:
        Simulation(config, seed).run()
    except AssertionError:  # InvariantViolation is one
        return True
    return False


@pytest.mark.parametrize(
    ("mutate", "config"),
    [
        (break_hold_until_terminal, FAULTY),
        (break_commit, FAULTY),
        (break_step_holds, SLOW_STEPS),
    ],
)
def test_a_broken_rule_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None],
    config: SimulationConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_to_tell(monkeypatch)
    for seed in range(4):
        Simulation(config, seed).run()
    mutate(monkeypatch)
    assert any(breaks(config, seed) for seed in range(60))
