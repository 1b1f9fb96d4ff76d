"""How long to wait before something that ended is started again; no I/O, no clock."""

_STABLE_S = 60.0
"""Who has run for so long is no crash loop: the next end counts as the first."""
_FIRST_S = 1.0
_LONGEST_S = 60.0


class BackOff:
    """Delays of one thing that ends again and again: at first none, then longer and longer."""

    def __init__(self) -> None:
        self._num_ends = 0
        self._runs_since_s: float | None = None

    def runs(self, now_s: float) -> None:
        """It runs as it should; to be said once of each life, repeating it does nothing."""
        if self._runs_since_s is None:
            self._runs_since_s = now_s

    def ended(self, now_s: float) -> float:
        """Seconds until it may start again."""
        since_s, self._runs_since_s = self._runs_since_s, None
        if since_s is not None and now_s - since_s >= _STABLE_S:
            self._num_ends = 0
        self._num_ends += 1
        if self._num_ends == 1:
            return 0.0
        return float(min(_LONGEST_S, _FIRST_S * 2 ** min(self._num_ends - 2, 10)))
