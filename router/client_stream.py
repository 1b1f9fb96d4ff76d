"""The tokens of one request on their way from the dispatcher to whoever answers the client."""

import asyncio
from collections.abc import Callable

from disagg.errors import CancelledError, DisaggError
from disagg.messages.outputs import FinishReason
from disagg.messages.sampling import TokenLogprobs
from disagg.routing.actions import Deliver, NewRequest

STOP_STRING = "stop string"
"""The reason of a cancel that is a success for the client."""


class ClientStream:
    """Deltas that wait for one client: written by the dispatcher, read by its answer.

    One writer, one reader, one event loop. ``max_tokens`` bounds what waits, and a slow client
    delays nobody else.

    Attributes:
        request: the client's request.
    """

    def __init__(self, request: NewRequest, cancel: Callable[[str, str], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._pending: list[Deliver] = []
        self._error: DisaggError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def put(self, delta: Deliver) -> None:
        """Hand new tokens to the reader; called by the dispatcher."""
        self._pending.append(delta)
        self._ended = delta.finish_reason is not FinishReason.NONE
        self._wake()

    def fail(self, error: DisaggError) -> None:
        """Dispatcher's side: the request ended without being complete."""
        self._error = error
        self._ended = True
        self._wake()

    async def next(self) -> Deliver:
        """Wait for tokens and take all there are, as one delta.

        Raises:
            DisaggError: the request failed; tokens delivered before were handed out first.
        """
        if not self._pending:
            if self._error is None:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if not self._pending:
                assert self._error is not None
                raise self._error
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            return pending[0]
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for delta in pending:
            tokens += delta.token_ids
            logprobs += delta.logprobs
        last = pending[-1].finish_reason
        return Deliver(self.request_id, tuple(tokens), tuple(logprobs), last)

    def cancel(self, reason: str) -> None:
        """End the stream, whose client is gone. The workers are informed at once; idempotent."""
        if not self._ended:
            self._cancel(self.request_id, reason)
            self._pending.clear()
            self.fail(CancelledError(reason, request_id=self.request_id))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
