"""How often a worker is heard, in the time in which the router itself ran."""

from dataclasses import dataclass

TICK_MS_MAX = 500
"""Goes by at most between two ticks."""
GAPS_MAX = 4
"""A silence is unusual when it is so many times as long as the longest one before it."""
OBSERVED_MS = 5_000
"""Time under load after which a worker's rhythm is known."""
REMEMBERED_MS = 120_000
"""Silences are remembered for so long, and for twice as long at most."""


class RouterTime:
    """Milliseconds in which the router ran: what came while it stood still it hears afterwards.

    A tick that comes late counts as `TICK_MS_MAX`; between it and the next one the router reads what
    has waited. So its own stalls make nobody look silent.

    Attributes:
        ran_ms: as of the last tick.
    """

    def __init__(self) -> None:
        self.ran_ms = 0
        self._ticked_ms: int | None = None

    def at(self, now_ms: int) -> int:
        """How long it had run at that time, which is not before the last tick."""
        if self._ticked_ms is None:
            self._ticked_ms = now_ms
        return self.ran_ms + min(now_ms - self._ticked_ms, TICK_MS_MAX)

    def tick(self, now_ms: int) -> int:
        """The router runs; returns `at` this time."""
        self.ran_ms, self._ticked_ms = self.at(now_ms), now_ms
        return self.ran_ms


@dataclass(slots=True)
class Pulse:
    """How often a worker was heard. All times are the router's, see `RouterTime`."""

    heard_ms: int = 0
    awaited_ms: int = 0
    """When it was given work after it had none: it need not have said anything before."""
    loaded_ms: int = 0
    """How long it has been observed under load."""
    longest_ms: int = 0
    """Longest silence under load of this period."""
    longest_before_ms: int = 0
    """Of the one before."""
    period_ms: int = 0
    """When this period began."""

    def heard(self, now_ms: int, *, loaded: bool) -> None:
        """It said something; ``loaded``: it had work until now."""
        if loaded:
            silence_ms = self.silent_ms(now_ms)
            self.loaded_ms += silence_ms
            if now_ms - self.period_ms > REMEMBERED_MS:
                self.longest_before_ms, self.longest_ms = self.longest_ms, 0
                self.period_ms = now_ms
            self.longest_ms = max(self.longest_ms, silence_ms)
        self.heard_ms = now_ms

    def silent_ms(self, now_ms: int) -> int:
        """For how long it has said nothing while it had work."""
        return now_ms - max(self.heard_ms, self.awaited_ms)

    def unusual_ms(self, least_ms: int, most_ms: int) -> int:
        """A silence under load so long says that it is lost."""
        if self.loaded_ms < OBSERVED_MS:
            return most_ms
        usual_ms = max(self.longest_ms, self.longest_before_ms)
        return min(max(least_ms, GAPS_MAX * usual_ms), most_ms)
