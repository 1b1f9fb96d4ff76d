"""Links between router and workers: in order, with delays, until they break."""

from collections.abc import Callable
from typing import Protocol

ROUTER = "router"
"""Its end of a link; a worker's end has the worker's name."""


class Clock(Protocol):
    """What links need of the world."""

    now_ms: int

    def draw(self, low: int, high: int) -> int:
        """A seeded random number, both ends included."""

    def event(self, delay_ms: int, happen: Callable[[], None]) -> None:
        """Let something happen after a delay."""


class SimulatedLinks:
    """One link per pair, made when it is first used; a broken one works again at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_ms: dict[tuple[str, str], int] = {}
        self._life: dict[frozenset[str], int] = {}

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver in order after a random delay, unless the link breaks before."""
        clock = self._clock
        arrival = max(clock.now_ms + clock.draw(0, 5), self._free_ms.get((source, target), 0))
        self._free_ms[source, target] = arrival
        link = frozenset((source, target))
        life = self._life.get(link, 0)

        def arrive() -> None:
            if self._life.get(link, 0) == life:
                deliver()

        clock.event(arrival - clock.now_ms, arrive)

    def cut(self, one: str, other: str) -> None:
        """What is under way on a link is lost."""
        link = frozenset((one, other))
        self._life[link] = self._life.get(link, 0) + 1
