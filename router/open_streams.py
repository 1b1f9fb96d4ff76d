"""Requests in progress, counted by the key that sent them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from disagg.errors import CapacityError
from disagg.router.callers import Caller

RETRY_AFTER_MAX_S = 60
MEAN_SHARE = 0.1
"""Weight of the newest stream in a key's mean duration."""


@dataclass(slots=True)
class _Key:
    num_open: int = 0
    mean_s: float = 0.0
    """Duration of its streams; 0 before one has ended."""


class OpenStreams:
    """Bounds the requests of each key: from its head to the end of its answer.

    Where there are no keys, those of each network are counted as one key's.

    Args:
        per_key_max: requests of one key at once.
        clock_s: does not go back.
    """

    def __init__(self, per_key_max: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._per_key_max = per_key_max
        self._clock_s = clock_s
        self._keys: dict[tuple[str, str], _Key] = {}

    def num_open(self, caller: Caller) -> int:
        """Requests in progress of a caller's key."""
        key = self._keys.get((caller.tenant, caller.key_name))
        return key.num_open if key is not None else 0

    def open(self, caller: Caller) -> "OpenStream":
        """Count a request from now until the end of the context that is returned.

        Raises:
            CapacityError: the key has as many as it may; nothing was counted.
        """
        name = (caller.tenant, caller.key_name)
        key = self._keys.setdefault(name, _Key())
        if key.num_open >= self._per_key_max:
            # The next of them ends, at their usual pace, after this.
            wait_s = ceil(key.mean_s / key.num_open)
            raise CapacityError(
                f"{key.num_open} requests of this key are in progress (limits.streams_per_key_max)",
                retry_after_s=max(1, min(RETRY_AFTER_MAX_S, wait_s)),
            )
        key.num_open += 1
        return OpenStream(self, name, self._clock_s())

    def close(self, name: tuple[str, str], start_s: float) -> None:
        """One of a key's requests, in progress since then, is so no more."""
        key = self._keys[name]
        took_s = self._clock_s() - start_s
        key.mean_s += (took_s - key.mean_s) * (MEAN_SHARE if key.mean_s else 1)
        key.num_open -= 1
        if not key.num_open:
            del self._keys[name]


class OpenStream:
    """A request of a key while it is in progress: a context."""

    __slots__ = ("_name", "_start_s", "_streams")

    def __init__(self, streams: OpenStreams, name: tuple[str, str], start_s: float) -> None:
        self._streams, self._name, self._start_s = streams, name, start_s

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._streams.close(self._name, self._start_s)
