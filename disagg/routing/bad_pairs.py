"""Pairs of workers between which a transfer failed lately."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from disagg.messages.identity import Incarnation

BAD_PAIRS_MAX = 4096
STUCK_REST_MS_MAX = 300_000
STUCK_KNOWN_MS = 600_000
"""So long after a rest the next one is longer."""


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

    Where READs did not end the link is at fault, as one that loses large packets, and whoever reads
    over it ends for them in time: so the next life of either worker rests as well, and a probe that
    ends in the same way is followed by a rest twice as long.

    Args:
        rest_ms: for so long.
    """

    def __init__(self, rest_ms: int) -> None:
        self._rest_ms = rest_ms
        self._until_ms: dict[frozenset[Incarnation], int] = {}
        self._stuck: dict[frozenset[str], tuple[int, int]] = {}
        """Of workers between which READs did not end, by ids: the last rest, and its end."""
        self._resting = NONE_RESTS
        self._valid_until_ms = 0

    def failed(
        self, now_ms: int, one: Incarnation, other: Incarnation, *, stuck: bool = False
    ) -> None:
        """A transfer between them failed; ``stuck``: a READ did not end."""
        self._forget(now_ms)
        if len(self._until_ms) < BAD_PAIRS_MAX:
            rest_ms = self._stuck_ms(now_ms, one, other) if stuck else self._rest_ms
            pair = frozenset((one, other))
            self._until_ms[pair] = max(self._until_ms.get(pair, 0), now_ms + rest_ms)
            self._valid_until_ms = 0

    def begins(self, worker: Incarnation) -> None:
        """A worker has come; pairs of an earlier life of its rest on where READs did not end."""
        for pair, until_ms in list(self._until_ms.items()):
            ids = frozenset(one.worker_id for one in pair)
            if ids in self._stuck and worker.worker_id in ids and worker not in pair:
                others = (one for one in pair if one.worker_id != worker.worker_id)
                self._until_ms[frozenset((worker, *others))] = until_ms
                self._valid_until_ms = 0

    def at(self, now_ms: int) -> RestingPairs:
        """Those that rest."""
        if now_ms >= self._valid_until_ms:
            self._forget(now_ms)
            self._resting = RestingPairs(self._until_ms) if self._until_ms else NONE_RESTS
            self._valid_until_ms = min(self._until_ms.values(), default=now_ms)
        return self._resting

    def _stuck_ms(self, now_ms: int, one: Incarnation, other: Incarnation) -> int:
        """How long a pair rests now: twice as long as the last time, unless that was long ago."""
        ids = frozenset((one.worker_id, other.worker_id))
        rest_ms, until_ms = self._stuck.pop(ids, (self._rest_ms, now_ms))
        if until_ms < now_ms:  # it was probed since; many READs may fail at once
            rest_ms = min(2 * rest_ms, max(self._rest_ms, STUCK_REST_MS_MAX))
        if len(self._stuck) < BAD_PAIRS_MAX:
            self._stuck[ids] = rest_ms, now_ms + rest_ms
        return rest_ms

    def _forget(self, now_ms: int) -> None:
        self._until_ms = {p: t for p, t in self._until_ms.items() if t > now_ms}
        since_ms = now_ms - STUCK_KNOWN_MS
        self._stuck = {ids: rest for ids, rest in self._stuck.items() if rest[1] > since_ms}
