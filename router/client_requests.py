"""Requests that live: who waits for their tokens, and who observes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from disagg.errors import CapacityError, DisaggError
from disagg.messages.session import ToWorkerMessage
from disagg.messages.submit import Submit
from disagg.router.client_stream import ClientStream
from disagg.router.observed_call import ObservedChoice
from disagg.routing.actions import Deliver, NewRequest
from disagg.routing.record import RequestRecord

PROMPT_LOGPROBS_SHARE = 8
"""All live requests may have so many times what one may."""


class LiveRequest(NamedTuple):
    """One that was accepted and has not ended."""

    stream: ClientStream
    observed: ObservedChoice


class ClientRequests:
    """By their id, from the accepted request to its end. Used from one event loop.

    What is said of others is ignored: their client has gone before.

    Args:
        find_record: of the core.
        prompt_logprobs_max: of its prompt's log-probabilities one request may ask for so many.
    """

    def __init__(
        self, find_record: Callable[[str], RequestRecord | None], prompt_logprobs_max: int
    ) -> None:
        self._find_record = find_record
        self._prompt_logprobs_max = PROMPT_LOGPROBS_SHARE * prompt_logprobs_max
        self._requests: dict[str, LiveRequest] = {}

    def __iter__(self) -> Iterator[LiveRequest]:
        """Those there are at the beginning; who iterates may end some."""
        return iter(tuple(self._requests.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        """A request that lives; None: none of this id does."""
        return self._requests.get(request_id)

    def check_prompt_logprobs(self, request: NewRequest) -> None:
        """Raise CapacityError where the live requests would have too many to be kept."""
        if not request.num_prompt_numbers:
            return
        num = sum(live.stream.request.num_prompt_numbers for live in self._requests.values())
        bound = self._prompt_logprobs_max
        if num + request.num_prompt_numbers > bound:
            raise CapacityError(
                f"live requests have {num} log-probabilities of their prompts, at most {bound}",
                request_id=request.request_id,
            )

    def add(self, stream: ClientStream, observed: ObservedChoice) -> None:
        """A request was accepted."""
        self._requests[stream.request_id] = LiveRequest(stream, observed)

    def deliver(self, delta: Deliver) -> None:
        """Tokens came, or the end of a request that is complete."""
        live = self._requests.get(delta.request_id)
        if live is None:
            return
        live.observed.delivered(len(delta.token_ids), self.record)
        if delta.finish_reason:
            del self._requests[delta.request_id]
            live.observed.ended(delta.finish_reason.value, self.record(delta.request_id))
        live.stream.put(delta)

    def fail(self, request_id: str, error: DisaggError) -> None:
        """A request ended without being complete; its client hears why."""
        live = self._requests.pop(request_id, None)
        if live is not None:
            live.observed.ended(error.code, self.record(request_id), error.message)
            live.stream.fail(error)

    def pop(self, request_id: str) -> LiveRequest | None:
        """Take out a request that somebody ends; who does so tells its observer."""
        return self._requests.pop(request_id, None)

    def record(self, request_id: str) -> RequestRecord:
        """Of a request that lives, or has ended just now."""
        record = self._find_record(request_id)
        assert record is not None
        return record

    def traced(self, message: ToWorkerMessage) -> ToWorkerMessage:
        """A message for a worker; a submit with the trace context of its request."""
        if isinstance(message, Submit) and (live := self._requests.get(message.key.request_id)):
            context = live.observed.traceparent
            return replace(message, traceparent=context) if context else message
        return message
