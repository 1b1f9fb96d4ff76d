"""Ends of tier copies as the ranks of a worker report them, put together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from disagg.errors import InvariantViolation
from disagg.scheduling.actions import TierKey


@dataclass(slots=True)
class _Copy:
    """A copy, or an emptying, that some ranks have not ended."""

    waiting: set[int]
    error: str = ""


@dataclass(slots=True)
class _Write(_Copy):
    stored: dict[TierKey, None] | None = None
    evicted: dict[TierKey, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Read(_Copy):
    intact: tuple[bool, ...] = ()


_AnyCopy = TypeVar("_AnyCopy", bound=_Copy)


class RankEnds:
    """What became of copies that every rank makes of its own part of each block.

    A copy has ended when the last rank's has. A tier has a block if all ranks stored it, and has it
    no more as soon as one gave it up; a block came whole out of it if it did at every rank.

    Ranks end copies in any order: what one gives up for a copy may be what it stored for another
    one that a slower rank has not ended.

    Args:
        num_ranks: each reports each copy once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._writes: dict[int, _Write] = {}
        self._reads: dict[int, _Read] = {}
        self._clears: dict[str, _Copy] = {}

    def begin_write(self, copy_id: int) -> None:
        """All ranks are told to write."""
        self._writes[copy_id] = _Write(self._all())

    def begin_read(self, copy_id: int, num_blocks: int) -> None:
        """All ranks are told to read."""
        self._reads[copy_id] = _Read(self._all(), intact=(True,) * num_blocks)

    def begin_clear(self, tier: str) -> None:
        """All ranks are told to empty a tier."""
        self._clears[tier] = _Copy(self._all())

    def written(
        self,
        rank: int,
        copy_id: int,
        stored: Sequence[TierKey],
        evicted: Sequence[TierKey],
        error: str,
    ) -> tuple[tuple[TierKey, ...], tuple[TierKey, ...], str] | None:
        """A rank has ended a write.

        Returns:
            After the last rank: what all have, what any gave up, and the first error.

        Raises:
            InvariantViolation: the rank has ended it before, or nobody began it.
        """
        for other in self._writes.values():
            if other.stored and rank not in other.waiting:
                for key in evicted:
                    other.stored.pop(key, None)
        write = _answered(self._writes.get(copy_id), rank, error)
        before = stored if write.stored is None else write.stored
        now = set(stored)
        write.evicted |= dict.fromkeys(evicted)
        write.stored = {key: None for key in before if key in now and key not in write.evicted}
        if write.waiting:
            return None
        del self._writes[copy_id]
        return tuple(write.stored), tuple(write.evicted), write.error

    def was_read(self, rank: int, copy_id: int, intact: Sequence[bool]) -> tuple[bool, ...] | None:
        """A rank has ended a read; after the last one, of each block whether it came whole.

        Raises:
            InvariantViolation: the rank has ended it before, or nobody began it.
        """
        read = _answered(self._reads.get(copy_id), rank, "")
        read.intact = tuple(a and b for a, b in zip(read.intact, intact, strict=True))
        if read.waiting:
            return None
        del self._reads[copy_id]
        return read.intact

    def cleared(self, rank: int, tier: str, error: str) -> str | None:
        """A rank has emptied a tier, or failed to; after the last one, the first error or "".

        Raises:
            InvariantViolation: the rank has ended it before, or nobody began it.
        """
        clear = _answered(self._clears.get(tier), rank, error)
        if clear.waiting:
            return None
        del self._clears[tier]
        return clear.error

    def _all(self) -> set[int]:
        return set(range(self._num_ranks))


def known_to_all(known: Sequence[Sequence[TierKey]]) -> tuple[TierKey, ...]:
    """What the tiers of all ranks have, in the order of the first rank's."""
    first, *others = known
    sets = [set(keys) for keys in others]
    return tuple(key for key in first if all(key in keys for keys in sets))


def _answered(copy: _AnyCopy | None, rank: int, error: str) -> _AnyCopy:
    if copy is None or rank not in copy.waiting:
        raise InvariantViolation(f"rank {rank} ended a tier copy that it was not told of")
    copy.waiting.remove(rank)
    if error:
        copy.error = copy.error or f"rank {rank}: {error}"
    return copy
