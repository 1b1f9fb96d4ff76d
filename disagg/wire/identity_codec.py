"""Request keys, incarnations and attempts on the wire."""

from google.protobuf.message import Message

from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.wire.checks import require_set, require_text
from disagg.wire.v1 import identity_pb2


def key_to_wire(key: RequestKey) -> identity_pb2.RequestKey:
    """Encode a request key."""
    return identity_pb2.RequestKey(
        request_id=key.request_id, generation=key.generation, router=key.router
    )


def put_key(wire: identity_pb2.RequestKey, key: RequestKey) -> None:
    """Encode a request key in its place."""
    wire.request_id, wire.generation, wire.router = key


def key_from_wire(parent: Message, field: str = "key", *, router: str | None = None) -> RequestKey:
    """Decode the request key in a field of ``parent``.

    Args:
        parent: the message.
        field: where in it.
        router: whose session it came on: no other router's requests are spoken of there.
    """
    wire: identity_pb2.RequestKey = getattr(parent, field)
    request_id = wire.request_id
    if not request_id:  # what has a text is set
        require_set(parent, field)
        require_text(wire, "request_id")
    return RequestKey(request_id, wire.generation, wire.router if router is None else router)


def incarnation_to_wire(incarnation: Incarnation) -> identity_pb2.Incarnation:
    """Encode a worker's incarnation."""
    return identity_pb2.Incarnation(worker_id=incarnation.worker_id, epoch=incarnation.epoch)


def put_incarnation(wire: identity_pb2.Incarnation, incarnation: Incarnation) -> None:
    """Encode a worker's incarnation in its place."""
    wire.worker_id, wire.epoch = incarnation


def incarnation_from_wire(parent: Message, field: str) -> Incarnation:
    """Decode the incarnation in a field of ``parent``."""
    require_set(parent, field)
    wire: identity_pb2.Incarnation = getattr(parent, field)
    require_text(wire, "worker_id", "epoch")
    return Incarnation(wire.worker_id, wire.epoch)


def attempt_to_wire(attempt: Attempt) -> identity_pb2.Attempt:
    """Encode an attempt."""
    return identity_pb2.Attempt(reader_epoch=attempt.reader_epoch, number=attempt.number)


def attempt_from_wire(parent: Message, field: str = "attempt") -> Attempt:
    """Decode the attempt in a field of ``parent``."""
    require_set(parent, field)
    wire: identity_pb2.Attempt = getattr(parent, field)
    require_text(wire, "reader_epoch")
    return Attempt(wire.reader_epoch, wire.number)
