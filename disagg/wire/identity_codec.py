"""Request keys, incarnations and attempts on the wire."""

from google.protobuf.message import Message

from disagg.transfer.identity import Attempt, Incarnation, RequestKey
from disagg.wire.checks import require_set, require_text
from disagg.wire.v1 import common_pb2 as common
from disagg.wire.v1 import peer_pb2 as peer


def key_to_wire(key: RequestKey) -> common.RequestKey:
    """Encode a request key."""
    return common.RequestKey(request_id=key.request_id, generation=key.generation)


def key_from_wire(parent: Message, field: str = "key") -> RequestKey:
    """Decode the request key in a field of ``parent``."""
    require_set(parent, field)
    wire: common.RequestKey = getattr(parent, field)
    require_text(wire, "request_id")
    return RequestKey(wire.request_id, wire.generation)


def incarnation_to_wire(incarnation: Incarnation) -> common.Incarnation:
    """Encode an incarnation."""
    return common.Incarnation(worker_id=incarnation.worker_id, epoch=incarnation.epoch)


def incarnation_from_wire(parent: Message, field: str) -> Incarnation:
    """Decode the incarnation in a field of ``parent``."""
    require_set(parent, field)
    wire: common.Incarnation = getattr(parent, field)
    require_text(wire, "worker_id", "epoch")
    return Incarnation(wire.worker_id, wire.epoch)


def attempt_to_wire(attempt: Attempt) -> peer.Attempt:
    """Encode an attempt."""
    return peer.Attempt(reader_epoch=attempt.reader_epoch, number=attempt.number)


def attempt_from_wire(parent: Message, field: str = "attempt") -> Attempt:
    """Decode the attempt in a field of ``parent``."""
    require_set(parent, field)
    wire: peer.Attempt = getattr(parent, field)
    require_text(wire, "reader_epoch")
    return Attempt(wire.reader_epoch, wire.number)
