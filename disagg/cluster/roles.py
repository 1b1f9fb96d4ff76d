"""Which worker has which role, when counts change; no I/O."""

from collections.abc import Mapping

from disagg.cluster.counts import Counts


def own_role(worker_id: str) -> str:
    """The role for which a worker was first made, as its id says."""
    return worker_id.rpartition("-")[0].rpartition("-")[2]


def assign_roles(
    counts: Counts,
    present: Mapping[str, str] | None = None,
    *,
    may_change: bool = True,
    prefix: str = "",
) -> dict[str, str]:
    """Give every wanted worker its id and role, so that as little as can be changes.

    Who has a role that is wanted keeps it. Who has one too many takes another that is missing;
    what is missing then is new.

    Args:
        counts: how many of each role.
        present: role by id of the workers that there are; of those with one role the first stay.
        may_change: whether a worker can take another role; if not, it leaves and a new one comes.
        prefix: before the ids of all workers; who has another one leaves.

    Returns:
        Role by id; without the workers that are to leave.
    """
    present = {one: role for one, role in (present or {}).items() if _prefix(one) == prefix}
    stem = f"{prefix}-" if prefix else ""
    assigned: dict[str, str] = {}
    spare: list[str] = []
    left = counts.by_role
    for worker_id, role in present.items():
        if left.get(role, 0):
            left[role] -= 1
            assigned[worker_id] = role
        else:
            spare.append(worker_id)
    for role, missing in left.items():
        for _ in range(missing):
            if may_change and spare:
                # Back to its own role rather than away from it.
                worker_id = min(spare, key=lambda one: own_role(one) != role)
                spare.remove(worker_id)
            else:
                worker_id = _free_id(stem + role, present.keys() | assigned.keys())
            assigned[worker_id] = role
    return assigned


def _prefix(worker_id: str) -> str:
    return worker_id.rpartition("-")[0].rpartition("-")[0]


def _free_id(name: str, taken: set[str]) -> str:
    number = 0
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"
