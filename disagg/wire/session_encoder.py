"""What a router sends to its workers on the wire, the two parts of a generation made together."""

from disagg.messages.session import ToWorkerMessage
from disagg.messages.submit import Role, Submit
from disagg.wire.session_codec import session_request_to_wire
from disagg.wire.submit_codec import submit_to_wire
from disagg.wire.v1 import session_pb2


class SessionEncoder:
    """Encodes the messages of a router to all of its workers, in the order in which they are sent.

    The submits of a decode and of a prefill worker follow each other and have the same prompt: the
    second one is a copy, in a seventh of the time; of 64k tokens in a third.
    """

    def __init__(self) -> None:
        self._first: tuple[Submit, session_pb2.SessionRequest] | None = None
        """The last submit of a decode, until its prefill's or another one comes."""

    def encode(self, message: ToWorkerMessage) -> session_pb2.SessionRequest:
        """Encode a message of the router to a worker."""
        if not isinstance(message, Submit):
            return session_request_to_wire(message)
        first, self._first = self._first, None
        if first is not None and _are_of_one(first[0], message):
            return submit_to_wire(message, first[1])
        request = submit_to_wire(message)
        if message.role is Role.DECODE and message.take_over is None:
            self._first = message, request
        return request


def _are_of_one(one: Submit, other: Submit) -> bool:
    """Whether two submits are parts of one generation: they differ in the worker's part alone."""
    return (
        one.key == other.key
        and one.token_ids is other.token_ids
        and one.hashes is other.hashes
        and one.sampling is other.sampling
        and (one.cache_salt, one.traceparent) == (other.cache_salt, other.traceparent)
    )
