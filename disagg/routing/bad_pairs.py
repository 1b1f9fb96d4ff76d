"""Pairs of workers between which a transfer failed lately."""

from disagg.messages.identity import Incarnation

BAD_PAIRS_MAX = 4096


class BadPairs:
    """Such pairs rest for a while, then the next request probes them.

    Args:
        rest_ms: for so long.
    """

    def __init__(self, rest_ms: int) -> None:
        self._rest_ms = rest_ms
        self._until_ms: dict[frozenset[Incarnation], int] = {}

    def failed(self, now_ms: int, one: Incarnation, other: Incarnation) -> None:
        """A transfer between them failed."""
        self._until_ms = {p: t for p, t in self._until_ms.items() if t > now_ms}
        if len(self._until_ms) < BAD_PAIRS_MAX:
            self._until_ms[frozenset((one, other))] = now_ms + self._rest_ms

    def at(self, now_ms: int) -> frozenset[frozenset[Incarnation]]:
        """Those that rest."""
        if not self._until_ms:
            return frozenset()
        return frozenset(pair for pair, until_ms in self._until_ms.items() if until_ms > now_ms)
