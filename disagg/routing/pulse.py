"""How often a worker is heard, in the time in which the router itself ran."""

from dataclasses import dataclass, field

TICK_MS_MAX = 500
"""Goes by at most between two ticks."""
GAPS_MAX = 4
"""A silence is unusual when it is so many times as long as the longest one before it."""
OBSERVED_MS = 5_000
"""Time under load after which a worker's rhythm is known."""
REMEMBERED_MS = 120_000
"""What was longest is remembered for so long, and for twice as long at most."""


@dataclass(slots=True)
class Longest:
    """The longest of the times that were seen in the last minutes."""

    began_ms: int = 0
    """When this period began."""
    now_ms: int = 0
    """Longest of this period."""
    before_ms: int = 0
    """Of the one before."""

    def see(self, now_ms: int, time_ms: int) -> None:
        """Take one in."""
        if now_ms - self.began_ms > REMEMBERED_MS:
            self.before_ms, self.now_ms, self.began_ms = self.now_ms, 0, now_ms
        self.now_ms = max(self.now_ms, time_ms)

    @property
    def ms(self) -> int:
        """Which it is."""
        return max(self.now_ms, self.before_ms)


class RouterTime:
    """Milliseconds in which the router ran: what came while it stood still it hears afterwards.

    A tick that comes late counts as `TICK_MS_MAX`; between it and the next one the router reads
    what has waited. So its own stalls make nobody look silent.

    Attributes:
        ran_ms: as of the last tick.
        longest_tick: between two ticks; a machine on which that is long may be one of workers too.
    """

    def __init__(self) -> None:
        self.ran_ms = 0
        self.longest_tick = Longest()
        self._ticked_ms: int | None = None

    def at(self, now_ms: int) -> int:
        """How long it had run at that time, which is not before the last tick."""
        if self._ticked_ms is None:
            self._ticked_ms = now_ms
        return self.ran_ms + min(now_ms - self._ticked_ms, TICK_MS_MAX)

    def tick(self, now_ms: int) -> int:
        """The router runs; returns `at` this time."""
        ran_ms = self.at(now_ms)
        self.longest_tick.see(ran_ms, ran_ms - self.ran_ms)
        self.ran_ms, self._ticked_ms = ran_ms, now_ms
        return ran_ms


@dataclass(slots=True)
class Pulse:
    """How often a worker was heard. All times are the router's, see `RouterTime`."""

    heard_ms: int = 0
    awaited_ms: int = 0
    """When it was given work after it had none: it need not have said anything before."""
    loaded_ms: int = 0
    """How long it has been observed under load."""
    longest: Longest = field(default_factory=Longest)
    """Its silences under load."""

    def heard(self, now_ms: int, *, loaded: bool) -> None:
        """It said something; ``loaded``: it had work until now."""
        if loaded:
            silence_ms = self.silent_ms(now_ms)
            self.loaded_ms += silence_ms
            self.longest.see(now_ms, silence_ms)
        self.heard_ms = now_ms

    def silent_ms(self, now_ms: int) -> int:
        """For how long it has said nothing while it had work."""
        return now_ms - max(self.heard_ms, self.awaited_ms)
