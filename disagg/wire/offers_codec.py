"""Offers of a lease, and the requests that a lease answers, on the wire."""

from google.protobuf.message import Message

from disagg.messages.peer import AskLease, OfferedRange, Offers, Seal, TakeOver
from disagg.wire.checks import join_hashes, malformed, split_hashes
from disagg.wire.identity_codec import key_from_wire, key_to_wire
from disagg.wire.sampling_codec import top_from_wire, top_to_wire
from disagg.wire.v1 import peer_pb2


def offers_to_wire(offers: Offers) -> peer_pb2.Offers:
    """Encode offers, with their seal if there is one."""
    return peer_pb2.Offers(
        key=key_to_wire(offers.key),
        lease_id=offers.lease_id,
        first=offers.first,
        ranges=[
            peer_pb2.OfferedRange(
                group=r.group,
                block_index=r.block_index,
                block_id=r.block_id,
                num_blocks=r.num_blocks,
                checksums=r.checksums,
            )
            for r in offers.ranges
        ],
        seal=None if offers.seal is None else _seal_to_wire(offers.seal),
        dead=offers.dead,
        request_number=offers.request_number,
        num_computed_tokens=offers.num_computed_tokens,
    )


def offers_from_wire(wire: peer_pb2.Offers) -> Offers:
    """Decode offers, with their seal if there is one."""
    for offered in wire.ranges:
        if not offered.num_blocks:
            raise malformed(offered, "num_blocks", "is 0")
        if offered.checksums and len(offered.checksums) != offered.num_blocks:
            problem = f"has {len(offered.checksums)} entries for {offered.num_blocks} blocks"
            raise malformed(offered, "checksums", problem)
    return Offers(
        key=key_from_wire(wire),
        lease_id=wire.lease_id,
        first=wire.first,
        ranges=tuple(
            OfferedRange(r.group, r.block_index, r.block_id, r.num_blocks, tuple(r.checksums))
            for r in wire.ranges
        ),
        seal=_seal_from_wire(wire.seal) if wire.HasField("seal") else None,
        dead=wire.dead,
        request_number=(
            request_number_from_wire(wire, "request_number")
            if wire.HasField("request_number")
            else None
        ),
        num_computed_tokens=wire.num_computed_tokens,
    )


def ask_lease_to_wire(message: AskLease) -> peer_pb2.AskLease:
    """Encode a request for a cached prefix."""
    return peer_pb2.AskLease(
        key=key_to_wire(message.key),
        number=message.number,
        num_tokens=message.num_tokens,
        first_hash=message.first_hash,
        hashes=join_hashes(message.hashes),
        first_lacked=message.first_lacked,
        alignment_tokens=message.alignment_tokens,
    )


def ask_lease_from_wire(wire: peer_pb2.AskLease) -> AskLease:
    """Decode a request for a cached prefix."""
    for field in ("num_tokens", "hashes", "alignment_tokens"):
        if not getattr(wire, field):
            raise malformed(wire, field, "is empty")
    return AskLease(
        key=key_from_wire(wire),
        number=request_number_from_wire(wire),
        num_tokens=wire.num_tokens,
        first_hash=wire.first_hash,
        hashes=split_hashes(wire, "hashes"),
        first_lacked=tuple(wire.first_lacked),
        alignment_tokens=wire.alignment_tokens,
    )


def take_over_to_wire(message: TakeOver) -> peer_pb2.TakeOver:
    """Encode a request for the lease of an earlier generation."""
    return peer_pb2.TakeOver(
        key=key_to_wire(message.key),
        number=message.number,
        old=key_to_wire(message.old),
        first_lacked=message.first_lacked,
    )


def take_over_from_wire(wire: peer_pb2.TakeOver) -> TakeOver:
    """Decode a request for the lease of an earlier generation."""
    return TakeOver(
        key_from_wire(wire),
        request_number_from_wire(wire),
        key_from_wire(wire, "old"),
        tuple(wire.first_lacked),
    )


def request_number_from_wire(wire: Message, field: str = "number") -> int:
    """Decode the number of a request for a lease; they count from 1."""
    number: int = getattr(wire, field)
    if not number:
        raise malformed(wire, field, "is 0")
    return number


def _seal_to_wire(seal: Seal) -> peer_pb2.Seal:
    return peer_pb2.Seal(
        num_tokens=seal.num_tokens,
        num_ranges=seal.num_ranges,
        first_token_id=seal.first_token_id,
        first_logprob=seal.first_logprob,
        first_top=top_to_wire(seal.first_top_logprobs),
    )


def _seal_from_wire(wire: peer_pb2.Seal) -> Seal:
    return Seal(
        num_tokens=wire.num_tokens,
        num_ranges=tuple(wire.num_ranges),
        first_token_id=wire.first_token_id if wire.HasField("first_token_id") else None,
        first_logprob=wire.first_logprob,
        first_top_logprobs=top_from_wire(wire.first_top),
    )
