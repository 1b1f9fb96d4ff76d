"""The wires between workers: each sends and receives one READ after the other."""

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.place import LinkCost


class Wires:
    """When READs end, if bytes come and go in turn at every worker.

    Args:
        link: what a READ takes where nobody else uses either end.
    """

    def __init__(self, link: LinkCost) -> None:
        self._link = link
        self._sends_until: dict[Incarnation, float] = {}
        self._receives_until: dict[Incarnation, float] = {}

    def read_ms(
        self, now_ms: float, owner: Incarnation, reader: Incarnation, num_bytes: int
    ) -> float:
        """Milliseconds until a READ that is posted now has ended; it takes its turn."""
        begins = max(
            now_ms, self._sends_until.get(owner, 0.0), self._receives_until.get(reader, 0.0)
        )
        ends = begins + num_bytes / (1 << 20) * self._link.mib_ms
        self._sends_until[owner] = self._receives_until[reader] = ends
        return ends + self._link.read_ms - now_ms
