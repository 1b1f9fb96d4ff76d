"""What READs between two workers have taken, fitted by their bytes."""

from dataclasses import dataclass, field

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.fading_mean import (
    IDLE_HALF_LIFE_MS,
    OUTLIER_TIMES,
    USUAL_FIGURES,
)
from disagg.routing.estimates.least_squares import FadingFit
from disagg.routing.estimates.place import LinkCost

READS_HALF_LIFE = 50.0
ALL_READS_HALF_LIFE = 10_000.0
"""Of all pairs: what is usual, also after some minutes in which a network was slow."""
BORROWED_READS = 4.0
"""A pair is as all are until it has done more than so many itself."""
USUAL_MS_MIN = 1.0
"""What is usual is no less: the times are whole milliseconds."""
LINKS_MAX = 4096


@dataclass(slots=True)
class _Link:
    fit: FadingFit = field(default_factory=lambda: FadingFit(2, READS_HALF_LIFE))
    faded_ms: int = 0
    """When there was a READ, or those before have faded for lack of one."""


class Links:
    """Fits of READs by owner and reader, and of all where a pair has none, or none lately."""

    def __init__(self) -> None:
        self._links: dict[tuple[Incarnation, Incarnation], _Link] = {}
        self._all = FadingFit(2, ALL_READS_HALF_LIFE)
        self._usual: LinkCost | None = None
        """By all of them but the last few; None: too few to tell what is an outlier."""

    def read(
        self, now_ms: int, owner: Incarnation, reader: Incarnation, num_bytes: float, read_ms: float
    ) -> bool:
        """A READ took so long.

        Returns:
            Whether it counts: the first one of a pair, which has to connect, does not.
        """
        link = self._links.get((owner, reader))
        if link is None:
            if len(self._links) >= LINKS_MAX:
                del self._links[next(iter(self._links))]
            self._links[owner, reader] = _Link()
            return False
        link.faded_ms = now_ms
        features = (1.0, num_bytes / (1 << 20))
        link.fit.add_sample(features, read_ms)
        if self._usual is not None:
            usual_ms = max(self._usual.ms(num_bytes), USUAL_MS_MIN)
            read_ms = min(read_ms, OUTLIER_TIMES * usual_ms)
        self._all.add_sample(features, read_ms)
        if self._all.num_added % USUAL_FIGURES == 0:  # with each it would take as long as a message
            self._usual = _cost(self._all.coefficients())
        return True

    def forget(self, worker: Incarnation) -> None:
        """A worker has left; its READs stay a part of what is usual."""
        self._links = {pair: link for pair, link in self._links.items() if worker not in pair}

    def cost(self, now_ms: int, owner: Incarnation, reader: Incarnation) -> LinkCost | None:
        """What a READ takes between two workers; None where nobody has measured one."""
        link = self._links.get((owner, reader))
        if link is None:
            return _cost(self._all.coefficients())
        num_halved = (now_ms - link.faded_ms) // IDLE_HALF_LIFE_MS
        if num_halved > 0:
            link.faded_ms = now_ms
            link.fit.fade(0.5 ** min(num_halved, 64))
        return _cost(link.fit.coefficients(self._all, BORROWED_READS))


def _cost(found: tuple[float | None, ...]) -> LinkCost | None:
    read_ms, mib_ms = found
    return None if read_ms is None or mib_ms is None else LinkCost(read_ms, mib_ms)
