"""When spans begin and end, on a machine whose clock may be set meanwhile."""

import time
from collections.abc import Callable


class SpanClock:
    """The time since the Unix epoch as it was when this was made, and on from there by its own.

    By a clock that is set while a span is open it ends before it has begun, and what takes such a
    length for a number without a sign shows centuries. Made anew for each call or transfer, so that
    the next one is where it belongs.

    Args:
        wall_ns: nanoseconds since the Unix epoch; somebody may set it.
        monotonic_ns: nanoseconds that only grow.

    Attributes:
        began_ns: when it was made.
    """

    __slots__ = ("_monotonic_ns", "_offset_ns", "began_ns")

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.began_ns = wall_ns()
        self._monotonic_ns = monotonic_ns
        self._offset_ns = self.began_ns - monotonic_ns()

    def now_ns(self) -> int:
        """The time, never before ``began_ns``."""
        return self._monotonic_ns() + self._offset_ns
