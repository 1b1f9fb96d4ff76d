"""Workers as bits of an int, so that one operation is one for all of them."""

from collections.abc import Iterable, Iterator

from disagg.messages.identity import Incarnation

EVERYBODY = -1
"""The bits of all workers, and of all who may come: an int with all bits set."""


class WorkerBits:
    """A bit per worker; the lowest free one is given."""

    def __init__(self) -> None:
        self._used = 0
        self._bits: dict[Incarnation, int] = {}

    def add(self, worker: Incarnation) -> int:
        """Its bit, for as long as it is not removed."""
        bit = self._bits[worker] = ~self._used & (self._used + 1)
        self._used |= bit
        return bit

    def remove(self, worker: Incarnation) -> None:
        """It has no bit any more; the one it had is in use until it is given back."""
        del self._bits[worker]

    def give_back(self, bit: int) -> None:
        """This bit can be given to another worker."""
        self._used ^= bit

    def of_one(self, worker: Incarnation) -> int:
        """The bit of a worker; 0 where it has none."""
        return self._bits.get(worker, 0)

    def of(self, workers: Iterable[Incarnation]) -> int:
        """The bits of those of these workers that have one."""
        mask = 0
        for worker in workers:
            mask |= self._bits.get(worker, 0)
        return mask


def bits_of(mask: int) -> Iterator[int]:
    """The single bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def is_single(mask: int) -> bool:
    """Whether exactly one bit is set."""
    return mask > 0 and not mask & (mask - 1)
