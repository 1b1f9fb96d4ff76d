"""Workers as bits of an int, so that one operation is one for all of them."""

from collections.abc import Iterator

from disagg.messages.identity import Incarnation


class WorkerBits:
    """A bit per worker; the lowest free one is given."""

    def __init__(self) -> None:
        self._slots: list[Incarnation | None] = []

    def add(self, worker: Incarnation) -> int:
        """Its bit, for as long as it is not removed."""
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = worker
        else:
            slot = len(self._slots)
            self._slots.append(worker)
        return 1 << slot

    def remove(self, bit: int) -> None:
        """The bit can be given to another worker."""
        self._slots[bit.bit_length() - 1] = None


def bits_of(mask: int) -> Iterator[int]:
    """The single bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
