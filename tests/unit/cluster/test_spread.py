"""Workers are spread over hosts, whatever the order in which these join."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from disagg.cluster.spread import (
    RayHost,
    Seat,
    choose_host,
    describe_shortage,
    find_hosts,
    find_move,
    spread,
)

CPU = {"CPU": 0.1}
A, B, C = (RayHost(name, name, {"CPU": 2.0}, is_head=False) for name in "ABC")
HEAD = RayHost("head", "head", {"CPU": 2.0}, is_head=True)


def seats(num_prefill: int, num_decode: int, resources: Mapping[str, float] = CPU) -> list[Seat]:
    prefill = [Seat(f"prefill-{i}", "prefill", resources) for i in range(num_prefill)]
    return prefill + [Seat(f"decode-{i}", "decode", resources) for i in range(num_decode)]


def settle(all_seats: list[Seat], hosts: list[RayHost], placed: dict[str, str]) -> dict[str, str]:
    """Carry out every move, as the supervisor does, one at a time."""
    placed = dict(placed)
    for _ in range(100):
        move = find_move(all_seats, hosts, placed)
        if move is None:
            return placed
        placed[move[0]] = move[1]
    raise AssertionError(f"moves do not end: {placed}")


def test_one_of_each_role_keeps_away_from_the_head() -> None:
    for hosts in itertools.permutations([HEAD, A, B]):
        assert sorted(spread(seats(1, 1), hosts, {}).values()) == ["A", "B"]
    assert spread(seats(1, 1), [HEAD, A], {}) == {"prefill-0": "A", "decode-0": "head"}
    assert spread(seats(1, 1), [HEAD], {}) == {"prefill-0": "head", "decode-0": "head"}
    assert spread(seats(1, 1), [], {}) == {}


@pytest.mark.parametrize("hosts", list(itertools.permutations([A, B])))
def test_each_host_has_both_roles_where_there_are_two_of_each(hosts: tuple[RayHost]) -> None:
    placed = spread(seats(2, 2), hosts, {})
    for host in (A, B):
        there = sorted(name for name, node_id in placed.items() if node_id == host.node_id)
        assert [name.partition("-")[0] for name in there] == ["decode", "prefill"]


def test_workers_keep_the_hosts_they_have() -> None:
    taken = {"prefill-0": "A", "prefill-1": "A"}
    assert spread(seats(2, 1), [A, B], taken) == taken | {"decode-0": "B"}


def test_only_hosts_with_room_are_chosen() -> None:
    with_gpu = RayHost("gpu", "gpu", {"CPU": 2.0, "GPU": 1.0}, is_head=True)
    needs = {"CPU": 0.1, "GPU": 1.0}
    assert spread(seats(1, 0, needs), [A, B, with_gpu], {}) == {"prefill-0": "gpu"}
    assert spread(seats(1, 1, needs), [A, B, with_gpu], {}) == {"prefill-0": "gpu"}
    half = {"CPU": 0.1, "GPU": 0.5}
    assert set(spread(seats(1, 1, half), [A, B, with_gpu], {}).values()) == {"gpu"}


def test_whatever_the_order_in_which_hosts_join_they_end_up_even() -> None:
    all_seats = seats(3, 3)
    for order in itertools.permutations([HEAD, A, B]):
        placed: dict[str, str] = {}
        for num in range(1, 4):  # they join one by one, workers are placed at once
            hosts = list(order[:num])
            placed = settle(all_seats, hosts, spread(all_seats, hosts, placed))
        assert Counter(placed.values()) == {"A": 2, "B": 2, "head": 2}
        for host in "A", "B", "head":
            roles = [seat.role for seat in all_seats if placed[seat.worker_id] == host]
            assert sorted(roles) == ["decode", "prefill"], order


def test_a_host_that_is_lost_and_comes_back_is_used_again() -> None:
    all_seats = seats(2, 2)
    lost = spread(all_seats, [A], {})
    assert set(lost.values()) == {"A"}
    back = settle(all_seats, [A, B], lost)
    assert Counter(back.values()) == {"A": 2, "B": 2}
    assert {back["prefill-0"], back["prefill-1"]} == {"A", "B"}


def test_nothing_moves_without_need() -> None:
    assert find_move(seats(1, 1), [A, B, HEAD], {"prefill-0": "A", "decode-0": "head"}) is None
    assert find_move(seats(2, 1), [A, B], spread(seats(2, 1), [A, B], {})) is None
    # what is somewhere unknown is let be: it is about to be placed
    assert find_move(seats(1, 1), [A, B], {"prefill-0": "gone", "decode-0": "A"}) is None
    full = RayHost("full", "full", {"CPU": 0.05}, is_head=False)
    assert find_move(seats(1, 1), [A, full], {"prefill-0": "A", "decode-0": "A"}) is None


def node(name: str, *special: str, alive: bool = True, num_cpus: float = 2.0) -> dict[str, Any]:
    resources = {"CPU": num_cpus, **dict.fromkeys(special, 1.0)}
    return {"NodeID": name, "NodeManagerAddress": name, "Alive": alive, "Resources": resources}


def test_hosts_are_what_lives_and_has_processors_the_head_last() -> None:
    nodes = [
        node("1", "node:__internal_head__"),
        node("3"),
        node("2"),
        node("0", alive=False),
        node("4", num_cpus=0.0),
    ]
    assert [(host.node_id, host.is_head) for host in find_hosts(nodes)] == [
        ("2", False),
        ("3", False),
        ("1", True),
    ]


def test_a_worker_starts_again_where_it_was_unless_there_is_no_room() -> None:
    both = seats(1, 1)
    placed = {"prefill-0": "A", "decode-0": "A"}
    assert choose_host(both[0], both, [A, B], placed) == "A"
    assert choose_host(both[0], both, [B], placed) == "B"  # A has gone
    large = seats(1, 1, {"CPU": 1.5})
    assert choose_host(large[0], large, [A, B], placed) == "B"
    too_large = seats(1, 1, {"CPU": 3.0})
    assert choose_host(too_large[0], too_large, [A, B], placed) == ""
    said = describe_shortage(too_large[0], [A, B])
    assert said.startswith("it needs CPU 3 on one host")
    assert "A has CPU 2" in said
    assert describe_shortage(too_large[0], []).endswith("there is none")
