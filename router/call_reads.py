"""How many requests of gRPC calls are read at a time, as each may have megabytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from disagg.errors import CapacityError
from disagg.router.callers import Caller

READS_MAX = 8
"""Requests of one holder that are read at once: as many of the largest as HTTP has room for."""


@dataclass(slots=True)
class _Holder:
    num_calls: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_MAX))


class CallReads:
    """Lets the calls of a tenant, or of a network without keys, be read a few at a time.

    Args:
        calls_max: of one holder whose request has not come whole.
    """

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._holders: dict[tuple[str, str], _Holder] = {}

    @contextlib.asynccontextmanager
    async def turn(self, caller: Caller) -> AsyncIterator[None]:
        """Wait until a request of the caller may be read; it is within this context.

        Raises:
            CapacityError: as many calls as may wait for theirs already.
        """
        holder = self._holders.setdefault(caller.holder, _Holder())
        if holder.num_calls >= self._calls_max:
            raise CapacityError(
                f"{holder.num_calls} requests are on their way already "
                "(limits.streams_per_key_max)",
                retry_after_s=1,
            )
        holder.num_calls += 1
        try:
            async with holder.turns:
                yield
        finally:
            holder.num_calls -= 1
            if not holder.num_calls:
                del self._holders[caller.holder]
