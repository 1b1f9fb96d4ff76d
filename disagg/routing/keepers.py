"""Which worker keeps a name, so that all routers that know these workers ask the same one."""

from bisect import bisect_right, insort
from hashlib import blake2b

from disagg.messages.identity import Incarnation

POINTS = 16
"""Of each worker on the ring: so none keeps several times what another does."""


class Keepers:
    """A ring of hashes: a name's keeper is the worker of the next point after the name's own.

    Found in some comparisons, however many workers there are; who joins or leaves moves its own
    names only. (Consistent hashing: Karger et al. 1997.)
    """

    def __init__(self) -> None:
        self._points: list[tuple[bytes, Incarnation]] = []

    def add(self, worker: Incarnation) -> None:
        """It can be asked from now on; its points are by its id, which it keeps over its lives."""
        for point in _points(worker):
            insort(self._points, (point, worker))

    def remove(self, worker: Incarnation) -> None:
        """It keeps nothing any more; unknown ones are ignored."""
        self._points = [one for one in self._points if one[1] != worker]

    def of(self, name: bytes) -> Incarnation | None:
        """The worker that keeps a name; None without any."""
        if not self._points:
            return None
        place = bisect_right(self._points, _hash(name), key=lambda one: one[0])
        return self._points[place % len(self._points)][1]


def _points(worker: Incarnation) -> list[bytes]:
    return [_hash(f"{number} {worker.worker_id}".encode()) for number in range(POINTS)]


def _hash(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).digest()
