"""Connections that requests hold: nobody has nearly all of them."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from disagg.errors import CapacityError
from disagg.router.callers import Caller

SHARE = 15
"""Of what is left free, somebody may have so many times as much: all but a sixteenth alone."""


class HeldConnectionsError(CapacityError):
    """A caller's requests hold as many connections as they may."""


class ConnectionShares:
    """Bounds what the requests of one holder take of a port's connections.

    A request holds its connection from its head until its client has taken the answer, whether its
    body comes or not. A holder is a tenant; where no key is known, the network of an address.

    Args:
        connections_max: of the port.
    """

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._held: Counter[tuple[str, str]] = Counter()
        self._num_held = 0

    @contextlib.contextmanager
    def held_by(self, caller: Caller) -> Iterator[None]:
        """Count a request of a caller within this context.

        Raises:
            HeldConnectionsError: others would find nearly no connection; nothing was counted.
        """
        holder = caller.holder
        num_own, num_left = self._held[holder], self._connections_max - self._num_held - 1
        if num_own and num_own + 1 > SHARE * num_left:
            raise HeldConnectionsError(
                f"{num_own} connections are held by requests of this "
                f"{'tenant' if caller.tenant else 'address'}, nearly all that others leave of "
                f"{self._connections_max} (limits.connections_max)",
                retry_after_s=1,
            )
        self._held[holder] += 1
        self._num_held += 1
        try:
            yield
        finally:
            self._held[holder] -= 1
            self._num_held -= 1
            if not self._held[holder]:
                del self._held[holder]
