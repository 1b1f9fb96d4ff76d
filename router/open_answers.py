"""Requests that were accepted and are not answered to their end: what a drain waits for."""

import asyncio

from disagg.router.client_stream import ClientStream


class OpenAnswers:
    """Streams from the accepted request to its last byte: a client may read slower than we compute.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self._streams: set[ClientStream] = set()
        self._closed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: ClientStream) -> None:
        """A request was accepted."""
        self._streams.add(stream)

    def close(self, stream: ClientStream) -> None:
        """Its client has the answer, or is gone; idempotent."""
        self._streams.discard(stream)
        self._closed.set()

    async def all_closed(self) -> None:
        """Wait until none is open; others may be added meanwhile."""
        while self._streams:
            self._closed.clear()
            await self._closed.wait()
