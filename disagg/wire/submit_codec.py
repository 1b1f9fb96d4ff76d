"""Submits on the wire."""

from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.wire.checks import (
    enum_value,
    join_hashes,
    malformed,
    require_set,
    require_text,
    split_hashes,
)
from disagg.wire.identity_codec import (
    incarnation_from_wire,
    key_from_wire,
    put_incarnation,
    put_key,
)
from disagg.wire.sampling_codec import put_sampling, sampling_from_wire
from disagg.wire.v1 import session_pb2


def submit_to_wire(
    submit: Submit, other_part: session_pb2.SessionRequest | None = None
) -> session_pb2.SessionRequest:
    """Encode a submit.

    Args:
        submit: one part of a generation.
        other_part: its other part, to be copied but for what each part has of its own.
    """
    request = session_pb2.SessionRequest()
    # In its place, as all that it consists of: a message that is given to another one's constructor
    # is copied, and with it every token of the prompt, on the event loop of a router.
    wire = request.submit
    if other_part is not None:
        wire.CopyFrom(other_part.submit)
        for field in ("peer", "pull", "take_over"):
            wire.ClearField(field)
    else:
        put_key(wire.key, submit.key)
        wire.token_ids.extend(submit.token_ids)
        wire.hashes = join_hashes(submit.hashes)
        wire.cache_salt = submit.cache_salt
        put_sampling(wire.sampling, submit.sampling)
        wire.traceparent = submit.traceparent
    wire.role = submit.role
    if submit.peer is not None:
        put_address(wire.peer, submit.peer)
    if submit.pull is not None:
        put_address(wire.pull.owner, submit.pull.owner)
        wire.pull.num_tokens = submit.pull.num_tokens
    if submit.take_over is not None:
        put_key(wire.take_over, submit.take_over)
    return request


def put_address(wire: session_pb2.PeerAddress, address: PeerAddress) -> None:
    """Encode where a worker is reached, in its place."""
    put_incarnation(wire.incarnation, address.incarnation)
    wire.address = address.address


def address_from_wire(wire: session_pb2.PeerAddress) -> PeerAddress:
    """Decode where a worker is reached.

    Raises:
        ProtocolError: a field is missing or malformed.
    """
    require_text(wire, "address")
    return PeerAddress(incarnation_from_wire(wire, "incarnation"), wire.address)


def submit_from_wire(wire: session_pb2.Submit, router: str) -> Submit:
    """Decode a submit of a router.

    Raises:
        ProtocolError: a field is missing, malformed, or none of its role.
    """
    role = enum_value(Role, wire, "role")
    if not wire.token_ids:
        raise malformed(wire, "token_ids", "is empty")
    peer = address_from_wire(wire.peer) if wire.HasField("peer") else None
    pull = None
    if wire.HasField("pull"):
        require_set(wire.pull, "owner")
        pull = PullPlan(address_from_wire(wire.pull.owner), wire.pull.num_tokens)
    for field, forbidden in (("pull", role is Role.DECODE), ("take_over", role is not Role.DECODE)):
        if forbidden and wire.HasField(field):  # type: ignore[arg-type]
            raise malformed(wire, field, f"is set for role {role}")
    if (peer is None) != (role is Role.LOCAL):
        raise malformed(wire, "peer", f"is {'missing' if peer is None else 'set'} for role {role}")
    take_over = None
    if wire.HasField("take_over"):
        take_over = key_from_wire(wire, "take_over", router=router)
    return Submit(
        key=key_from_wire(wire, router=router),
        role=role,
        token_ids=tuple(wire.token_ids),
        hashes=split_hashes(wire, "hashes"),
        cache_salt=wire.cache_salt,
        sampling=sampling_from_wire(wire),
        peer=peer,
        pull=pull,
        take_over=take_over,
        traceparent=wire.traceparent,
    )
