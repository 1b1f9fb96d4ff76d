"""Workers whose blocks hold other numbers of tokens: hand-overs, pulls and take-overs are exact."""

import os
from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import InvariantViolation
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.scheduling.handover import worker_state
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.simulation import Simulation
from disagg.transfer.reader.parts import Parts, parts_of

NUM_SEEDS = int(os.environ.get("DISAGG_SIMULATION_SEEDS", "4")) // 2 or 1
HASH_TOKENS, BLOCKS_PER_STATE = 4, 3


def specs(kinds: str, tokens: int) -> list[Spec]:
    full, latents = FullAttentionSpec(tokens, 1, 8, 4), MLASpec(tokens, 1, 8, 4)
    by_name: dict[str, list[Spec]] = {
        "full": [full],
        "latents": [latents],
        "windows": [SlidingWindowSpec(tokens, 1, 8, 4, 8), SlidingWindowSpec(tokens, 1, 8, 4, 11)],
        "hybrid": [full, SlidingWindowSpec(tokens, 1, 8, 4, 11)],
        "chunks": [full, ChunkedLocalSpec(tokens, 1, 8, 4, 12)],
        "states": [full, LinearStateSpec(tokens, 300)],
    }
    return by_name[kinds]


KINDS = ("full", "latents", "windows", "hybrid", "chunks", "states")


def layout(kinds: str, tokens: int) -> KVCacheLayout:
    """A layer per group; every worker needs as many blocks for a state."""
    groups = tuple(
        KVCacheGroup(number, spec, (number,), BLOCKS_PER_STATE if spec.first_seen(0) is None else 1)
        for number, spec in enumerate(specs(kinds, tokens))
    )
    return KVCacheLayout(groups, 1024, HASH_TOKENS)


def world(kinds: str, sizes: tuple[int, ...], seed: int, **changes: Any) -> Simulation:
    layouts = tuple(layout(kinds, tokens) for tokens in sizes)
    config = SimulationConfig(layouts[0], layouts=layouts, num_blocks=200, **changes)
    return Simulation(config, seed)


def play(one: Simulation) -> None:
    one.run()
    outcomes = {name: client.outcome for name, client in one.clients.items()}
    assert set(outcomes.values()) == {"finished"}, outcomes


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (4, 16), (16, 4)])
@pytest.mark.parametrize("kinds", KINDS)
def test_every_hand_over_is_exact(kinds: str, sizes: tuple[int, ...]) -> None:
    num_reads = 0
    for seed in range(NUM_SEEDS):
        one = world(kinds, sizes, seed)
        play(one)
        assert one.num_handovers > 10
        num_reads += one.num_reads
    assert num_reads > 10 * NUM_SEEDS


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (8, 4, 16)])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_next_turn_pulls_its_history(kinds: str, sizes: tuple[int, ...]) -> None:
    """A decode worker has the last answer: the prefill worker pulls it over unequal blocks."""
    num_pulls, failed = 0, 0
    roles = ("prefill", "decode", "decode")[: len(sizes)]
    for seed in range(NUM_SEEDS):
        one = world(kinds, sizes, seed, roles=roles, continued_per_mille=700)
        play(one)
        num_pulls += one.num_pulls
        failed += one.pulls_failed.total()
    assert num_pulls + failed > 0
    if kinds in ("full", "latents", "states"):
        assert num_pulls > NUM_SEEDS, failed


@pytest.mark.parametrize("num_blocks", [90, 200])
@pytest.mark.parametrize("kinds", KINDS)
def test_whatever_befalls_them(kinds: str, num_blocks: int) -> None:
    """Kills, cut links, cancels, failing READs, leases that expire, pulls from anybody."""
    for seed in range(NUM_SEEDS):
        one = world(
            kinds,
            (4, 8, 16),
            seed,
            roles=("prefill", "decode", "both"),
            num_requests=30,
            continued_per_mille=700,
            wild_pulls_per_mille=600,
            num_kills=4,
            num_cuts=4,
            num_cancels=5,
            read_errors_per_mille=100,
            lease_ttl_ms=40,
        )
        Simulation(replace(one.config, num_blocks=num_blocks), seed).run()


def test_control_parts_in_wrong_places_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplaced(*args: Any) -> Parts:
        parts = parts_of(*args)
        first = tuple(
            {index: tuple(replace(one, pair=0) for one in of) for index, of in blocks.items()}
            for blocks in parts.by_block
        )
        return replace(parts, by_block=first)

    monkeypatch.setattr(worker_state, "parts_of", misplaced)
    with pytest.raises((InvariantViolation, AssertionError)):
        play(world("full", (4, 8), 0))


def test_control_blocks_not_withheld_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of a window that small blocks do not fill must not be found again."""
    monkeypatch.setattr(GroupManager, "withhold", lambda *_: None)
    wrong = 0
    for seed in range(20):
        one = world(
            "windows",
            (4, 8),
            seed,
            roles=("prefill", "both"),
            num_requests=40,
            continued_per_mille=900,
        )
        try:
            one.run()
        except (InvariantViolation, AssertionError):
            wrong += 1
    assert wrong
