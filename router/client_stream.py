"""The tokens of one request on their way from the dispatcher to whoever answers the client."""

import asyncio
from collections.abc import Callable

from disagg.errors import CancelledError, DisaggError, RequestError
from disagg.messages.outputs import FinishReason
from disagg.messages.sampling import TokenLogprobs
from disagg.routing.actions import Deliver, NewRequest

STOP_STRING = "stop string"
"""The reason of a cancel that is a success for the client."""
SLOW_READER = "the client reads too slowly"
"""The reason of a cancel by the bound on what waits for a client."""


class SlowReaderError(RequestError):
    """Too much of an answer waited for its client."""

    http_status = 408
    grpc_status = "RESOURCE_EXHAUSTED"
    code = "slow_reader"


class ClientStream:
    """Deltas that wait for one client: written by the dispatcher, read by its answer.

    One writer, one reader, one event loop. A slow client delays nobody else; one for which more
    than ``unread_tokens_max`` tokens wait is given up: the workers hold nothing for it any more.

    Attributes:
        request: the client's request.
    """

    def __init__(
        self,
        request: NewRequest,
        cancel: Callable[[str, str], None],
        unread_tokens_max: int,
        on_closed: "Callable[[ClientStream], None]" = lambda stream: None,
    ) -> None:
        self.request = request
        self._cancel = cancel
        self._on_closed = on_closed
        self._unread_tokens_max = unread_tokens_max
        self._num_unread = 0
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
        self._num_unread += len(delta.token_ids)
        self._ended = delta.finish_reason is not FinishReason.NONE
        self._wake()
        if self._num_unread > self._unread_tokens_max:
            # Not from here: the dispatcher is in the middle of a list of actions.
            asyncio.get_running_loop().call_soon(self._give_up)

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
        self._num_unread = 0
        if len(pending) == 1:
            return pending[0]
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for delta in pending:
            tokens += delta.token_ids
            logprobs += delta.logprobs
        last, prompt = pending[-1].finish_reason, pending[0].prompt_logprobs
        return Deliver(self.request_id, tuple(tokens), tuple(logprobs), last, prompt)

    def cancel(self, reason: str) -> None:
        """Close the stream: its client is gone, or has its answer; idempotent.

        If its request still runs, it ends, and the workers are informed at once.
        """
        self._on_closed(self)
        if not self._ended:
            self._cancel(self.request_id, reason)
            self._pending.clear()
            self.fail(CancelledError(reason, request_id=self.request_id))

    def _give_up(self) -> None:
        if not self._ended and self._num_unread > self._unread_tokens_max:
            self._cancel(self.request_id, SLOW_READER)
            self._pending.clear()
            self.fail(
                SlowReaderError(
                    f"more than {self._unread_tokens_max} tokens waited for the client to read "
                    "(limits.unread_tokens_max)",
                    request_id=self.request_id,
                )
            )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
