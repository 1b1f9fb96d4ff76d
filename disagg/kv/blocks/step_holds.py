"""Steps in flight as holders of the blocks that they use."""

from collections.abc import Hashable, Iterable

from disagg.errors import InvariantViolation
from disagg.kv.blocks.block_pool import BlockPool


class StepHolds:
    """A step holds every block its requests have from launch until its completion is known.

    While a request keeps a block, the request's own hold protects it; so steps take over a hold
    only when the request ends before they have. That makes launching a step cost one entry per
    request, not one per block. Such holds appear in the pool as ``("steps", n)``. What a request
    gives up as it goes on is out of its steps' sight (see ``KVCacheCoordinator.allocate``).

    Args:
        pool: the worker's pool.
        steps_max: steps in flight that one sequence may be in: promises count on it.
    """

    def __init__(self, pool: BlockPool, steps_max: int) -> None:
        self._pool = pool
        self._steps_max = steps_max
        self._keys: dict[Hashable, dict[Hashable, None]] = {}
        """Per step its requests, in their order."""
        self._given_up: dict[Hashable, set[Hashable]] = {}
        """Per holder the steps that can still touch what it holds."""
        self._num_records = 0

    def __len__(self) -> int:
        return len(self._keys)

    def in_flight(self, key: Hashable) -> bool:
        """Whether a step over this request has not completed."""
        return any(key in keys for keys in self._keys.values())

    def begin(self, step: Hashable, keys: Iterable[Hashable]) -> None:
        """Hold the blocks of ``keys`` for a step that is launched now."""
        if step in self._keys:
            raise InvariantViolation(f"step {step!r} is in flight already")
        taken = dict.fromkeys(keys)
        if len(self._keys) >= self._steps_max:
            for key in taken:
                if sum(key in others for others in self._keys.values()) >= self._steps_max:
                    raise InvariantViolation(f"{key!r} is in {self._steps_max} steps already")
        self._keys[step] = taken

    def drop(self, key: Hashable, block_ids: list[int]) -> None:
        """A request that ends gives up blocks: its steps in flight take the holds over."""
        steps = {step for step, keys in self._keys.items() if key in keys}
        if steps:
            self._num_records += 1
            holder = ("steps", self._num_records)
            self._pool.hold(holder, block_ids)
            self._given_up[holder] = steps
        self._pool.release(block_ids)

    def end(self, step: Hashable) -> None:
        """The step has completed or can no longer touch memory."""
        self._keys.pop(step, None)
        for holder, steps in list(self._given_up.items()):
            steps.discard(step)
            if not steps:
                del self._given_up[holder]
                self._pool.drop(holder)

    def forget(self, key: Hashable) -> None:
        """The request has ended; a later one of the same key is another one."""
        for keys in self._keys.values():
            keys.pop(key, None)
