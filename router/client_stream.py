"""The tokens of one request on their way from the dispatcher to whoever answers the client."""

import asyncio
from collections.abc import Callable

from disagg.errors import CancelledError, DisaggError, RequestError
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


class Unread:
    """Tokens that wait for one client, of all streams of its answer together.

    Past ``tokens_max`` it is given up: all of these streams end.
    """

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._num_tokens = 0
        self._streams: list[ClientStream] = []

    def share(self, stream: "ClientStream") -> None:
        """Let a stream end with the others."""
        self._streams.append(stream)

    def leave(self, stream: "ClientStream") -> None:
        """A stream is closed; idempotent."""
        if stream in self._streams:
            self._streams.remove(stream)

    def add(self, num_tokens: int) -> None:
        """Tokens came, or, where it is negative, were read."""
        self._num_tokens += num_tokens
        if num_tokens > 0 and self._num_tokens > self._tokens_max:
            # Not from here: the dispatcher is in the middle of a list of actions.
            asyncio.get_running_loop().call_soon(self._give_up)

    def _give_up(self) -> None:
        if self._num_tokens <= self._tokens_max:
            return
        for stream in self._streams:
            stream.give_up(
                SlowReaderError(
                    f"more than {self._tokens_max} tokens waited for the client to read "
                    "(limits.unread_tokens_max)",
                    request_id=stream.request_id,
                )
            )


class ClientStream:
    """Deltas that wait for one client: written by the dispatcher, read by its answer.

    One writer, one reader, one event loop. A slow client delays nobody else; one for which too many
    tokens wait is given up: the workers hold nothing for it any more.

    Attributes:
        request: the client's request.
        failure: why it is not complete; None while that is not known, and where its reader ended
            it.
    """

    def __init__(
        self,
        request: NewRequest,
        cancel: Callable[[str, str], None],
        unread: Unread,
        on_closed: "Callable[[ClientStream], None]" = lambda stream: None,
    ) -> None:
        self.request = request
        self.failure: DisaggError | None = None
        self._cancel = cancel
        self._on_closed = on_closed
        self._unread = unread
        unread.share(self)
        self._num_unread = 0
        self._pending: list[Deliver] = []
        self._error: Exception | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._take_now: Callable[[Deliver], bool] | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def put(self, delta: Deliver) -> None:
        """Hand new tokens to the reader; called by the dispatcher."""
        waiter = self._waiter
        if waiter is not None and self._take_now is not None and not waiter.done():
            try:  # the reader waits, and nothing does before this delta
                if self._take_now(delta):
                    return
            except Exception as error:  # a bug, and the reader's: the dispatcher serves others
                self._error = error
                self._wake()
                return
        self._pending.append(delta)
        self._num_unread += len(delta.token_ids)
        self._ended = bool(delta.finish_reason)
        self._wake()
        self._unread.add(len(delta.token_ids))

    def take_now(self, take: Callable[[Deliver], bool]) -> None:
        """While the reader waits let this take deltas without waking it; False: it did not.

        Waking a task costs more than all else that is done for a token.
        """
        self._take_now = take

    def fail(self, error: DisaggError) -> None:
        """Dispatcher's side: the request ended without being complete."""
        self.failure = error
        self._end(error)

    def _end(self, error: DisaggError) -> None:
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
        pending = self._take()
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

        If its request still runs, it ends, and the workers are informed at once. A stop string
        ends the request only.
        """
        if reason != STOP_STRING:  # what was found is still to be sent
            self._on_closed(self)
            # Who refers to it lets go, and it of them: else all that an answer has would be freed
            # only by the garbage collector, for which all streams stand still.
            self._unread.leave(self)
            self._take_now = None
        if not self._ended:
            self._cancel(self.request_id, reason)
            self._take()
            self._end(CancelledError(reason, request_id=self.request_id))

    def give_up(self, error: DisaggError) -> None:
        """End the request, if it still runs, because its client does not read."""
        if not self._ended:
            self._cancel(self.request_id, SLOW_READER)
            self._take()
            self.fail(error)

    def _take(self) -> list[Deliver]:
        pending, self._pending = self._pending, []
        self._unread.add(-self._num_unread)
        self._num_unread = 0
        return pending

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
