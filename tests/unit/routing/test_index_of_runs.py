"""The index of runs against sets of keys, whatever workers tell and in whatever order."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import (
    WHOLE,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    TierRemoved,
    TierStored,
)
from disagg.routing import boundaries, buckets, chain, chain_store, levels, positions
from disagg.routing.boundaries import Trailing
from disagg.routing.chain import Chain, Runs
from disagg.routing.index import PrefixIndex
from disagg.routing.positions import PositionTable
from disagg.routing.prefix_hits import PrefixHit
from tests.unit.routing.test_index import brute_force, group
from tests.unit.routing.test_levels import nobody_has_anything_lower
from tests.unit.routing.test_tier_index import Keys, loads_of

LAYOUTS = (
    [group("full_attention")],
    [group("full_attention"), group("sliding_window", 4, 13)],
    [group("full_attention", 8), group("chunked_local", 4, 16), group("sliding_window", 8, 6)],
    [group("mla"), group("linear_state")],
    [group("sliding_window", 4, 9), group("linear_state", 8)],
    [group("chunked_local", 8, 24), group("chunked_local", 4, 6)],
)
PROMPT_BLOCKS = 18
LENGTHS = st.integers(1, PROMPT_BLOCKS)
ORDERS = st.sampled_from(("in order", "in order", "reversed", "any", "twice", "mixed"))


def prompts() -> list[list[bytes]]:
    """Chains that branch: each value names all before it."""
    root = [sha256(b"0/%d" % i).digest() for i in range(PROMPT_BLOCKS)]
    made = [root]
    for number, (parent, at) in enumerate(((0, 0), (0, 7), (2, 12), (0, 12)), 1):
        own = [sha256(b"%d/%d" % (number, i)).digest() for i in range(at, PROMPT_BLOCKS)]
        made.append(made[parent][:at] + own)
    return made


PROMPTS = prompts()


class PlainIndex:
    """The same by sets of keys and brute force; places are the pool, then the tiers."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        self.places: dict[Incarnation, list[Keys]] = {}
        self.keys_max: dict[Incarnation, tuple[int, ...]] = {}

    def add(self, worker: Incarnation, keys_max: tuple[int, ...]) -> None:
        self.keys_max[worker] = keys_max
        self.places[worker] = [set() for _ in keys_max]

    def apply(self, worker: Incarnation, event: KVEvent) -> None:
        place = event.tier + 1 if isinstance(event, TierStored | TierRemoved | TierCleared) else 0
        if place >= len(self.places[worker]):
            return
        keys = self.places[worker][place]
        match event:
            case BlocksStored() | TierStored():
                for value in event.hashes:
                    if len(keys) < self.keys_max[worker][place]:
                        keys.add((event.group, value))
            case BlocksRemoved() | TierRemoved():
                keys -= {(event.group, value) for value in event.hashes}
            case AllCleared() | TierCleared():
                keys.clear()

    def hit(self, worker: Incarnation, num_tokens: int, hashes: list[bytes]) -> PrefixHit:
        places = self.places[worker]
        usable, alone = brute_force(self.groups, places[0], num_tokens, hashes, 4)
        reach, _ = brute_force(self.groups, set.union(*places), num_tokens, hashes, 4)
        loads = loads_of(self.groups, places, usable, reach, hashes)
        return PrefixHit(usable, alone, reach if loads else 0, tuple(sorted(loads.items())))


class IndexAgainstSets(RuleBasedStateMachine):
    """Workers come and go, tell the truth in any order, and forget."""

    @initialize(layout=st.sampled_from(LAYOUTS))
    def start(self, layout: list[Any]) -> None:
        self.index = PrefixIndex(layout, 4)
        self.plain = PlainIndex(layout)
        self.num_added = 0
        self.join((1000,))
        self.join((1000, 1000))

    @rule(keys_max=st.sampled_from([(1000,), (7,), (1000, 1000), (9, 5, 1000)]))
    def join(self, keys_max: tuple[int, ...]) -> None:
        if len(self.plain.places) < 5:
            self.num_added += 1
            worker = Incarnation(str(self.num_added), "1")
            self.index.add(worker, keys_max[0], keys_max[1:])
            self.plain.add(worker, keys_max)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if len(self.plain.places) > 2:
            worker = data.draw(st.sampled_from(list(self.plain.places)))
            self.index.remove(worker)
            del self.plain.places[worker]

    @rule(data=st.data(), stores=st.booleans(), snapshot=st.integers(0, 19).map(lambda n: n == 7))
    def tell(self, data: st.DataObject, stores: bool, snapshot: bool) -> None:
        worker = data.draw(st.sampled_from(list(self.plain.places)))
        event = self.event(data, stores=stores)
        if snapshot:
            for place in self.plain.places[worker]:
                place.clear()
        self.plain.apply(worker, event)
        number, part = self.index.next_sequence(worker), WHOLE if snapshot else None
        assert self.index.apply(worker, number, part, [event])

    @rule(data=st.data(), place=st.integers(0, 2))
    def clear(self, data: st.DataObject, place: int) -> None:
        worker = data.draw(st.sampled_from(list(self.plain.places)))
        event = TierCleared(place - 1) if place else AllCleared()
        self.plain.apply(worker, event)
        assert self.index.apply(worker, self.index.next_sequence(worker), None, [event])

    @rule(
        prompt=st.sampled_from(PROMPTS), num=st.integers(1, PROMPT_BLOCKS), more=st.integers(0, 3)
    )
    def ask(self, prompt: list[bytes], num: int, more: int) -> None:
        hashes, num_tokens = prompt[:num], 4 * num + more
        found = self.index.match(num_tokens, [bytes(bytearray(value)) for value in hashes])
        assert set(found) == set(self.plain.places)
        for worker, places in self.plain.places.items():
            assert found[worker] == self.plain.hit(worker, num_tokens, hashes)
            assert self.index.num_entries(worker) == sum(map(len, places))

    def event(self, data: st.DataObject, *, stores: bool) -> KVEvent:
        number = data.draw(st.integers(0, len(self.plain.groups) - 1))
        stride = self.plain.groups[number].block_tokens // 4
        blocks = data.draw(st.sampled_from(PROMPTS))[stride - 1 :: stride]
        first = data.draw(st.integers(0, len(blocks) - 1))
        run = blocks[first : first + data.draw(st.sampled_from((1, 2, 5, 30)))]
        match data.draw(ORDERS):
            case "reversed":
                run = run[::-1]
            case "any":
                run = data.draw(st.permutations(run))
            case "mixed":  # the ends of a piece, something else between them
                other = data.draw(st.sampled_from(PROMPTS))[stride - 1 :: stride]
                run = run[:1] + other[: max(0, len(run) - 2)] + run[1:][-1:]
            case "twice":
                run = run + run
        parent = data.draw(
            st.sampled_from((None, blocks[first - 1] if first else None, blocks[-1]))
        )
        place = data.draw(st.integers(0, 2))
        if place:
            kind = TierStored if stores else TierRemoved
            return kind(place - 1, number, tuple(run))
        if stores:
            return BlocksStored(number, tuple(run), parent, 4 * first, 4)
        return BlocksRemoved(number, tuple(run))

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for worker in self.plain.places:
                self.index.remove(worker)
            assert self.index.num_blocks == 0


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
EVERY = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
)
CONTROL = settings(
    EVERY, max_examples=600, derandomize=True, phases=[Phase.generate], database=None
)


@pytest.fixture(autouse=True)
def _prompts_and_chains_are_long_for_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_store, "DEAD_BLOCKS_MAX", 0)
    monkeypatch.setattr(positions, "_MANY", 4)
    monkeypatch.setattr(buckets, "KEPT_MAX", 4)
    monkeypatch.setattr(buckets, "_MANY", 4)
    monkeypatch.setattr(positions, "_SORTED_MIN", 6)
    monkeypatch.setattr(positions, "_WAITING_MAX", 8)
    monkeypatch.setattr(buckets, "_SEGMENT_MAX", 24)
    monkeypatch.setattr(boundaries, "_FEW", 0)
    monkeypatch.setattr(boundaries, "_BLOCKS_MIN", 1)
    monkeypatch.setattr(levels, "_STEPS_MAX", 1)
    monkeypatch.setattr(levels, "_SWEEP_RUNS", 2)


def test_equals_sets_of_keys() -> None:
    run_state_machine_as_test(IndexAgainstSets, settings=EVERY)


def _append_that_lets_runs_go_on(self: Chain, packed: bytes) -> None:
    self.values += packed
    self._num_layers_used += bytes(len(packed) // chain.VALUE_BYTES)


def _merge_without_looking(self: Runs, first: int, last: int) -> None:
    if 0 < first < len(self.masks):
        del self.masks[first], self.starts[first]


def _insert_again(self: PositionTable, values: Sequence[bytes], packed: bytes, first: int) -> int:
    """Also what has a position already."""
    self._coming |= {value: first + i for i, value in enumerate(values)}
    self._coming_chains.add(first >> chain.OFFSET_BITS)
    return len(values)


BROKEN = [
    (PositionTable, "insert", _insert_again),
    (Chain, "append", _append_that_lets_runs_go_on),
    (Runs, "merge", _merge_without_looking),
    (PositionTable, "move", lambda *_: None),
    (Trailing, "_look_down_to", nobody_has_anything_lower),
]


@pytest.mark.parametrize(("owner", "name", "broken"), BROKEN, ids=[name for _, name, _ in BROKEN])
def test_control_a_broken_index_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, InvariantViolation, LookupError, ValueError)):
        run_state_machine_as_test(IndexAgainstSets, settings=CONTROL)


A, B = Incarnation("a", "1"), Incarnation("b", "1")


def tell_other_blocks_between() -> int:
    """What B can use of a prompt of A, of which it told the ends with other blocks between."""
    index = PrefixIndex(LAYOUTS[0], 4)
    for worker in (A, B):
        index.add(worker, 100)
    mine, other = PROMPTS[0][:4], PROMPTS[1][7:9]
    index.apply(A, 0, None, [BlocksStored(0, tuple(mine), None, 0, 4)])
    assert index.match(17, mine)[A].usable_tokens == 16
    index.apply(B, 0, None, [BlocksStored(0, (mine[0], *other, mine[3]), None, 0, 4)])
    return index.match(17, mine)[B].usable_tokens


def test_what_workers_tell_proves_no_order() -> None:
    assert tell_other_blocks_between() == 4


def test_control_an_event_compared_at_its_end_only_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Chain, "num_equal", Chain.num_in_prompt)
    assert tell_other_blocks_between() == 16
