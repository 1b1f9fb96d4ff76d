"""Pairs of workers between which a transfer failed lately."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from disagg.messages.identity import Incarnation

BAD_PAIRS_MAX = 4096


class RestingPairs:
    """Pairs that rest at one moment, by either worker: each plan asks for some workers' only."""

    def __init__(self, pairs: Iterable[frozenset[Incarnation]] = ()) -> None:
        self._others: dict[Incarnation, set[Incarnation]] = {}
        for pair in pairs:
            for worker in pair:
                self._others.setdefault(worker, set()).update(pair - {worker})

    def others(self, worker: Incarnation) -> AbstractSet[Incarnation]:
        """With whom a worker exchanges nothing now."""
        return self._others.get(worker, set())


NONE_RESTS = RestingPairs()


class BadPairs:
    """Such pairs rest for a while, then the next request probes them.

    Args:
        rest_ms: for so long.
    """

    def __init__(self, rest_ms: int) -> None:
        self._rest_ms = rest_ms
        self._until_ms: dict[frozenset[Incarnation], int] = {}
        """The one that rests for longest last."""
        self._resting = NONE_RESTS
        self._valid_until_ms = 0

    def failed(self, now_ms: int, one: Incarnation, other: Incarnation) -> None:
        """A transfer between them failed."""
        self._forget(now_ms)
        if len(self._until_ms) < BAD_PAIRS_MAX:
            pair = frozenset((one, other))
            self._until_ms.pop(pair, None)
            self._until_ms[pair] = now_ms + self._rest_ms
            self._valid_until_ms = 0

    def at(self, now_ms: int) -> RestingPairs:
        """Those that rest."""
        if now_ms >= self._valid_until_ms:
            self._forget(now_ms)
            self._resting = RestingPairs(self._until_ms) if self._until_ms else NONE_RESTS
            self._valid_until_ms = next(iter(self._until_ms.values()), now_ms)
        return self._resting

    def _forget(self, now_ms: int) -> None:
        self._until_ms = {p: t for p, t in self._until_ms.items() if t > now_ms}
