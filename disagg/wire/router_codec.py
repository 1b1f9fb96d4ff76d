"""What the router answers to other front ends, on the wire."""

from disagg.messages.router import CacheMatch, WorkerMatch
from disagg.wire.identity_codec import incarnation_from_wire, incarnation_to_wire
from disagg.wire.v1 import router_pb2


def match_to_wire(match: WorkerMatch) -> router_pb2.WorkerMatch:
    """Encode how much of a prompt a worker holds."""
    return router_pb2.WorkerMatch(
        worker=incarnation_to_wire(match.worker),
        role=match.role,
        usable_tokens=match.usable_tokens,
        group_tokens=match.group_tokens,
    )


def match_from_wire(wire: router_pb2.WorkerMatch) -> WorkerMatch:
    """Decode how much of a prompt a worker holds."""
    return WorkerMatch(
        worker=incarnation_from_wire(wire, "worker"),
        role=wire.role,
        usable_tokens=wire.usable_tokens,
        group_tokens=tuple(wire.group_tokens),
    )


def cache_match_to_wire(match: CacheMatch) -> router_pb2.CacheMatch:
    """Encode how much of a prompt a followed server holds."""
    return router_pb2.CacheMatch(
        name=match.name, usable_tokens=match.usable_tokens, group_tokens=match.group_tokens
    )


def cache_match_from_wire(wire: router_pb2.CacheMatch) -> CacheMatch:
    """Decode how much of a prompt a followed server holds."""
    return CacheMatch(wire.name, wire.usable_tokens, tuple(wire.group_tokens))
