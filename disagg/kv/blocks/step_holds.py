"""Steps in flight as holders of the blocks that they use."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.kv.blocks.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class _GivenUp:
    """Blocks a request gave up while ``steps`` could still touch them."""

    holder: Hashable
    key: Hashable
    group: int
    block_ids: list[int]
    steps: set[Hashable]


class StepHolds:
    """A step holds every block its requests have from launch until its completion is known.

    While a request keeps a block, the request's own hold protects it; so steps take over a hold
    only when the request gives it up before they have ended. That makes launching a step cost
    one entry per request, not one per block. Such holds appear in the pool as ``("steps", n)``.

    Args:
        pool: the worker's pool.
        steps_max: steps in flight that one sequence may be in: promises count on it.
    """

    def __init__(self, pool: BlockPool, steps_max: int) -> None:
        self._pool = pool
        self._steps_max = steps_max
        self._keys: dict[Hashable, tuple[Hashable, ...]] = {}
        self._given_up: dict[Hashable, _GivenUp] = {}
        self._num_records = 0

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, step: Hashable, keys: Iterable[Hashable]) -> None:
        """Hold the blocks of ``keys`` for a step that is launched now."""
        if step in self._keys:
            raise InvariantViolation(f"step {step!r} is in flight already")
        taken = tuple(keys)
        if len(self._keys) >= self._steps_max:
            for key in taken:
                if sum(key in others for others in self._keys.values()) >= self._steps_max:
                    raise InvariantViolation(f"{key!r} is in {self._steps_max} steps already")
        self._keys[step] = taken

    def drop(self, key: Hashable, group: int, block_ids: list[int]) -> None:
        """A request gives up blocks: its steps in flight take the holds over, or they end."""
        steps = {step for step, keys in self._keys.items() if key in keys} if self._keys else None
        if steps:
            self._num_records += 1
            record = _GivenUp(("steps", self._num_records), key, group, block_ids, steps)
            self._pool.hold(record.holder, block_ids)
            self._given_up[record.holder] = record
        self._pool.release(block_ids)

    def end(self, step: Hashable) -> set[Hashable]:
        """The step has completed or can no longer touch memory.

        Returns:
            The live requests for which this ended a hold.
        """
        self._keys.pop(step, None)
        ended = set()
        for record in [r for r in self._given_up.values() if step in r.steps]:
            record.steps.discard(step)
            if not record.steps:
                del self._given_up[record.holder]
                self._pool.drop(record.holder)
                ended.add(record.key)
        return ended

    def forget(self, key: Hashable) -> None:
        """The request has ended; a later one of the same key is another one."""
        for step, keys in self._keys.items():
            if key in keys:
                self._keys[step] = tuple(other for other in keys if other != key)
        for record in self._given_up.values():
            if record.key == key:
                record.key = None

    def given_up(self, key: Hashable, group: int) -> list[int]:
        """Blocks of a live request that only its steps still hold for it."""
        return [
            block
            for record in self._given_up.values()
            if record.key == key and record.group == group
            for block in record.block_ids
        ]
