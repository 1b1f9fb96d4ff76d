"""Which host each worker goes to: as far from the others as there are hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HEAD = "node:__internal_head__"
"""A resource that Ray gives the node of its head."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker needs of its host.

    Attributes:
        worker_id: whose it is.
        role: prefill, decode or both.
        resources: amounts that Ray counts.
    """

    worker_id: str
    role: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RayHost:
    """A host that has joined.

    Attributes:
        node_id: Ray's name of it, a new one whenever it joins.
        address: by which it is reached.
        resources: all that it has.
        is_head: whether Ray's head runs there.
    """

    node_id: str
    address: str
    resources: Mapping[str, float]
    is_head: bool


def find_hosts(nodes: Sequence[Mapping[str, Any]]) -> list[RayHost]:
    """Hosts that live and may run workers, the head last.

    Args:
        nodes: as ``ray.nodes()`` lists them.
    """
    hosts = [
        RayHost(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            is_head=_HEAD in node["Resources"],
        )
        for node in nodes
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    ]
    return sorted(hosts, key=lambda host: (host.is_head, host.address, host.node_id))


def spread(
    seats: Sequence[Seat], hosts: Sequence[RayHost], taken: Mapping[str, str]
) -> dict[str, str]:
    """Choose a host for every worker that has none.

    On each in turn the fewest workers, then the fewest of its role, then not the head: so the loss
    of a host costs as little as can be, and of each role something is left.

    Args:
        seats: of all workers, in the order in which they choose.
        hosts: as `find_hosts` gives them.
        taken: node id by worker id, of workers that have one.

    Returns:
        Node id by worker id, also of those that had one; without those that no host has room for.
    """
    placed = dict(taken)
    for seat in seats:
        if seat.worker_id in placed:
            continue
        fitting = [host for host in hosts if _has_room(host, seat, seats, placed)]
        if fitting:
            best = min(fitting, key=lambda host: _crowd(host, seat, seats, placed))
            placed[seat.worker_id] = best.node_id
    return placed


def choose_host(
    seat: Seat, seats: Sequence[Seat], hosts: Sequence[RayHost], placed: Mapping[str, str]
) -> str:
    """The host on which a worker starts again: where it was if there is room, else by `spread`.

    Returns:
        Node id; "" where no host has room.
    """
    others = {worker_id: node for worker_id, node in placed.items() if worker_id != seat.worker_id}
    for host in hosts:
        if host.node_id == placed.get(seat.worker_id) and _has_room(host, seat, seats, others):
            return host.node_id
    return spread([seat, *seats], hosts, others).get(seat.worker_id, "")


def find_move(
    seats: Sequence[Seat], hosts: Sequence[RayHost], placed: Mapping[str, str]
) -> tuple[str, str] | None:
    """The next worker that should leave its host for one with at least two workers fewer.

    Every such move makes the hosts more equal, so moves come to an end.

    Returns:
        Worker id and node id; None when the workers are spread as they can be.
    """
    num_workers = {host.node_id: 0 for host in hosts}
    for node_id in placed.values():
        if node_id in num_workers:
            num_workers[node_id] += 1
    for seat in sorted(seats, key=lambda seat: -_num_beside(seat, seats, placed)):
        here = placed.get(seat.worker_id)
        if here not in num_workers:
            continue
        rest = {
            worker_id: node for worker_id, node in placed.items() if worker_id != seat.worker_id
        }
        there = spread([seat], hosts, rest).get(seat.worker_id, here)
        if num_workers[here] - num_workers[there] >= 2:
            return seat.worker_id, there
    return None


def describe_shortage(seat: Seat, hosts: Sequence[RayHost]) -> str:
    """What a worker needs of its host, and what the largest hosts have of it, used or not."""
    needed = {name: amount for name, amount in seat.resources.items() if amount}

    def amounts(given: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {given.get(name, 0.0):g}" for name in needed)

    largest = sorted(hosts, key=lambda host: [-host.resources.get(name, 0.0) for name in needed])
    have = "; ".join(f"{host.address} has {amounts(host.resources)}" for host in largest[:3])
    return f"it needs {amounts(needed)} on one host beside its workers; {have or 'there is none'}"


def _has_room(host: RayHost, seat: Seat, seats: Sequence[Seat], placed: Mapping[str, str]) -> bool:
    used = [other for other in seats if placed.get(other.worker_id) == host.node_id]
    return all(
        sum(other.resources.get(name, 0.0) for other in used) + amount
        <= host.resources.get(name, 0.0) + 1e-6
        for name, amount in seat.resources.items()
    )


def _crowd(
    host: RayHost, seat: Seat, seats: Sequence[Seat], placed: Mapping[str, str]
) -> tuple[int, int, bool]:
    there = [worker_id for worker_id, node_id in placed.items() if node_id == host.node_id]
    roles = {other.worker_id: other.role for other in seats}
    same = sum(1 for worker_id in there if roles.get(worker_id) == seat.role)
    return len(there), same, host.is_head


def _num_beside(seat: Seat, seats: Sequence[Seat], placed: Mapping[str, str]) -> int:
    """Workers of its role on its host."""
    here = placed.get(seat.worker_id)
    return sum(1 for each in seats if each.role == seat.role and placed.get(each.worker_id) == here)
