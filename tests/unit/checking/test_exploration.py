"""The exploration itself, and snapshots of what is explored."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any

import pytest

from disagg.checking.explorer.exploration import Goal, Step, explore
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.snapshots import Snapshots
from disagg.messages.identity import Incarnation, RequestKey


def steps(n: int) -> Iterator[Step[int]]:
    yield Step("add", (n + 1) % 5, broken="four" if n == 3 else "")
    yield Step("double", n * 2 % 5)


def test_the_shortest_trace_to_a_broken_promise() -> None:
    seen = explore(1, steps, states_max=10)
    assert (seen.problem, seen.trace) == ("four", ("add", "add", "add"))
    assert not explore(0, lambda n: [Step("step", n + 1)], states_max=9).exhausted


def test_goals_stay_reachable() -> None:
    two: Goal[int] = Goal("two", lambda n: n == 2)
    loop = explore(0, lambda n: [Step("step", (n + 1) % 5)], goals=(two,), states_max=9)
    assert (loop.exhausted, loop.num_states) == (True, 5)

    def with_trap(n: int) -> list[Step[int]]:
        return [Step("in", 7)] if n == 7 else [Step("in", 7), Step("out", 0)]

    zero: Goal[int] = Goal("zero", lambda n: n == 0)
    trap = explore(0, with_trap, goals=(zero,), states_max=9)
    assert (trap.problem, trap.trace) == ("from here no way leads to a zero", ("in",))
    spared: Goal[int] = Goal("zero", lambda n: n == 0, lambda n: n != 7)
    assert explore(0, with_trap, goals=(spared,), states_max=9).exhausted


@dataclass(slots=True)
class Part:
    values: Any = None


@dataclass(slots=True)
class Graph:
    one: Part
    other: Part
    values: Any
    keys: list[RequestKey] = field(default_factory=list)


@pytest.mark.parametrize("values", [[1], {"a": 1}, {1}, deque([1])], ids=lambda v: type(v).__name__)
def test_what_is_shared_and_mutable_stays_shared(values: Any) -> None:
    part = Part(values)
    graph = Graph(part, part, values, [RequestKey("r", 1)])
    snapshots = Snapshots([])
    frozen = snapshots.freeze(graph)
    thawed = snapshots.thaw(frozen)
    assert thawed == graph
    assert thawed.one is thawed.other
    assert thawed.values is thawed.one.values
    assert thawed.values is not values
    assert snapshots.freeze(thawed) == frozen
    apart = Graph(part, part, type(values)(values), [RequestKey("r", 1)])
    assert snapshots.freeze(apart) != frozen, "a list of its own behaves otherwise"


def test_what_was_frozen_before_does_not_show() -> None:
    """Which attributes share is foreseen from the graphs before: a guess, never the result."""

    def graphs() -> Iterator[Graph]:
        nested, outer, part = [1], [[2]], Part([3])
        yield Graph(Part([1]), Part([1]), [1])
        yield Graph(Part(nested), Part(nested), [1])
        yield Graph(Part([1]), Part(nested), nested)
        yield Graph(Part((nested,)), Part(nested), [1])  # met in a tuple before it is an attribute
        yield Graph(Part(outer), Part(outer), outer[0])  # and inside of one that is shared
        yield Graph(Part(outer), Part(outer), [2])
        yield Graph(part, part, part.values)

    apart = [Snapshots([]) for _ in graphs()]
    for snapshots, graph in zip(apart, graphs(), strict=True):
        snapshots.freeze(graph)
    alone = [snapshots._frozen[0] for snapshots in apart]
    assert len(set(alone)) == len(alone)
    for order in permutations(range(len(alone)), 3):
        snapshots, all_of_them = Snapshots([]), list(graphs())
        for number in order:
            frozen = snapshots.freeze(all_of_them[number])
            assert snapshots._frozen[frozen] == alone[number], order


def test_who_shares_an_equal_value_does_not_show() -> None:
    snapshots, text = Snapshots([]), "ab"
    key = RequestKey(text, 1)
    one = Graph(Part(text), Part(text), (1, 2), [key, key])
    other = Graph(Part("a" + text[1:]), Part(text), (1, 2), [key, RequestKey(text, 1)])
    assert snapshots.freeze(one) == snapshots.freeze(other)


def test_a_worker_thaws_as_it_was_frozen() -> None:
    moves = Moves(Setting())
    start = moves.start()
    workers, number = moves.workers, start.workers[0]
    core = workers.thaw(number)
    assert core.leases.holds is core.kv.pool is core.inbound.holds
    assert workers.freeze(core) == workers.freeze(workers.thaw(number))
    core.kv.pool.hold("somebody", core.kv.pool.allocate(1))
    assert workers.freeze(core) != workers.freeze(workers.thaw(number))


def test_a_router_thaws_as_it_was_frozen() -> None:
    moves = Moves(Setting(roles=("prefill", "decode")))
    start = moves.start().router
    core = moves.routers.thaw(start)
    assert core._fleet is core._lifecycle._fleet
    assert core.counters is core._lifecycle.counters
    assert moves.routers.freeze(core) == start
    core.cancel(0, "r", "gone")
    assert moves.routers.freeze(core) != start


def test_a_router_is_the_same_whichever_of_a_pair_was_named_first() -> None:
    """How a set of two is ordered inside depends, for one pair in eight, on who came first."""
    moves = Moves(Setting(roles=("prefill", "decode")))
    start = moves.start().router
    lives = [Incarnation(name, "1") for name in "abcdefghijklmnop"]
    for one, other in combinations(lives, 2):
        frozen = []
        for pair in ((one, other), (other, one)):
            core = moves.routers.thaw(start)
            core._fleet.bad_pairs.failed(0, *pair)
            frozen.append(moves.routers.freeze(core))
        assert frozen[0] == frozen[1] != start


@dataclass
class Bag:
    """A part of a frozen graph."""

    items: set[tuple[int, bytes]]
    fixed: frozenset[str]


def test_how_a_set_came_to_be_does_not_show() -> None:
    snapshots = Snapshots([])
    keys = [(number, bytes([number]) * 32) for number in range(16)]
    for one, other in combinations(keys, 2):
        several = [
            Bag(set(pair), frozenset(map(str, pair))) for pair in ((one, other), (other, one))
        ]
        shrunk = Bag(set(keys), several[0].fixed)
        shrunk.items.intersection_update((one, other))
        assert len({snapshots.freeze(bag) for bag in (*several, shrunk)}) == 1
    bag = snapshots.thaw(snapshots.freeze(Bag({keys[0]}, frozenset("a"))))
    assert (bag.items, bag.fixed) == ({keys[0]}, {"a"})
