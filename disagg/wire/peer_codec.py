"""Messages between two workers on the wire."""

from typing import assert_never

from disagg.messages.identity import Incarnation
from disagg.messages.peer import (
    AskLease,
    AskOffers,
    Commit,
    CommitAnswer,
    CommitSeen,
    Ended,
    LeaseLoading,
    LeaseRefused,
    Offers,
    PeerMessage,
    ReadProgress,
    Release,
    Reserve,
    Reserved,
    TakeOver,
    WithdrawLease,
    WrongEpoch,
)
from disagg.wire.checks import malformed, require_text
from disagg.wire.identity_codec import (
    attempt_from_wire,
    attempt_to_wire,
    incarnation_from_wire,
    incarnation_to_wire,
    key_from_wire,
    key_to_wire,
)
from disagg.wire.offers_codec import (
    ask_lease_from_wire,
    ask_lease_to_wire,
    offers_from_wire,
    offers_to_wire,
    request_number_from_wire,
    take_over_from_wire,
    take_over_to_wire,
)
from disagg.wire.registration_codec import contract_from_wire, contract_to_wire
from disagg.wire.stream_hello import PeerHello, PoolInfo
from disagg.wire.v1 import peer_pb2

MEMORY_KINDS = ("DRAM", "VRAM")


def peer_to_wire(
    sender: Incarnation, addressee_epoch: str, message: PeerMessage | PeerHello
) -> peer_pb2.PeerEnvelope:
    """Put a message into its envelope.

    Args:
        sender: this worker.
        addressee_epoch: of the worker it is meant for; "" only in a hello that cannot know it.
        message: a message of the protocol, or the hello of a new stream.
    """
    envelope = peer_pb2.PeerEnvelope(
        sender=incarnation_to_wire(sender), addressee_epoch=addressee_epoch
    )
    match message:
        case PeerHello():
            envelope.hello.CopyFrom(_hello_to_wire(message))
        case Reserve(key, number, traceparent):
            envelope.reserve.CopyFrom(
                peer_pb2.Reserve(key=key_to_wire(key), number=number, traceparent=traceparent)
            )
        case Reserved(key, number, granted, reason, first_lacked):
            envelope.reserved.CopyFrom(
                peer_pb2.Reserved(
                    key=key_to_wire(key),
                    number=number,
                    granted=granted,
                    reason=reason,
                    first_lacked=first_lacked,
                )
            )
        case Release(key, number):
            envelope.release.CopyFrom(peer_pb2.Release(key=key_to_wire(key), number=number))
        case Offers():
            envelope.offers.CopyFrom(offers_to_wire(message))
        case ReadProgress(key, lease_id, num_blocks_read):
            envelope.read_progress.CopyFrom(
                peer_pb2.ReadProgress(
                    key=key_to_wire(key), lease_id=lease_id, num_blocks_read=num_blocks_read
                )
            )
        case AskOffers(key, lease_id, first):
            envelope.ask_offers.CopyFrom(
                peer_pb2.AskOffers(key=key_to_wire(key), lease_id=lease_id, first=first)
            )
        case Commit(key, lease_id, attempt, num_ranges):
            envelope.commit.CopyFrom(
                peer_pb2.Commit(
                    key=key_to_wire(key),
                    lease_id=lease_id,
                    attempt=attempt_to_wire(attempt),
                    num_ranges=num_ranges,
                )
            )
        case CommitAnswer(key, lease_id, attempt, ok, reason):
            envelope.commit_answer.CopyFrom(
                peer_pb2.CommitAnswer(
                    key=key_to_wire(key),
                    lease_id=lease_id,
                    attempt=attempt_to_wire(attempt),
                    ok=ok,
                    reason=reason,
                )
            )
        case CommitSeen(key, lease_id, attempt):
            envelope.commit_seen.CopyFrom(
                peer_pb2.CommitSeen(
                    key=key_to_wire(key), lease_id=lease_id, attempt=attempt_to_wire(attempt)
                )
            )
        case AskLease():
            envelope.ask_lease.CopyFrom(ask_lease_to_wire(message))
        case TakeOver():
            envelope.take_over.CopyFrom(take_over_to_wire(message))
        case LeaseRefused(key, request_number):
            envelope.lease_refused.CopyFrom(
                peer_pb2.LeaseRefused(key=key_to_wire(key), request_number=request_number)
            )
        case LeaseLoading(key, request_number, num_blocks):
            envelope.lease_loading.CopyFrom(
                peer_pb2.LeaseLoading(
                    key=key_to_wire(key), request_number=request_number, num_blocks=num_blocks
                )
            )
        case WithdrawLease(key, number, reason):
            envelope.withdraw_lease.CopyFrom(
                peer_pb2.WithdrawLease(key=key_to_wire(key), number=number, reason=reason)
            )
        case Ended(key, reason):
            envelope.ended.CopyFrom(peer_pb2.Ended(key=key_to_wire(key), reason=reason))
        case WrongEpoch(expected_epoch):
            envelope.wrong_epoch.CopyFrom(peer_pb2.WrongEpoch(expected_epoch=expected_epoch))
        case _:
            assert_never(message)
    return envelope


def peer_from_wire(
    envelope: peer_pb2.PeerEnvelope,
) -> tuple[Incarnation, str, PeerMessage | PeerHello]:
    """Take a message out of its envelope.

    Returns:
        Sender, addressee epoch and message. Whether the epoch is ours is the caller's to check.

    Raises:
        ProtocolError: a field is missing or malformed, or the kind of message is unknown.
    """
    message = _body_from_wire(envelope)
    if not isinstance(message, PeerHello):
        require_text(envelope, "addressee_epoch")
    return incarnation_from_wire(envelope, "sender"), envelope.addressee_epoch, message


def _body_from_wire(envelope: peer_pb2.PeerEnvelope) -> PeerMessage | PeerHello:
    match envelope.WhichOneof("message"):
        case "hello":
            return _hello_from_wire(envelope.hello)
        case "reserve":
            reserve = envelope.reserve
            return Reserve(key_from_wire(reserve), reserve.number, reserve.traceparent)
        case "reserved":
            reserved = envelope.reserved
            return Reserved(
                key_from_wire(reserved),
                reserved.number,
                reserved.granted,
                reserved.reason,
                tuple(reserved.first_lacked),
            )
        case "release":
            release = envelope.release
            return Release(key_from_wire(release), release.number)
        case "offers":
            return offers_from_wire(envelope.offers)
        case "read_progress":
            progress = envelope.read_progress
            return ReadProgress(
                key_from_wire(progress), progress.lease_id, progress.num_blocks_read
            )
        case "ask_offers":
            ask = envelope.ask_offers
            lease_id = ask.lease_id if ask.HasField("lease_id") else None
            return AskOffers(key_from_wire(ask), lease_id, ask.first)
        case "commit":
            commit = envelope.commit
            return Commit(
                key_from_wire(commit),
                commit.lease_id,
                attempt_from_wire(commit),
                tuple(commit.num_ranges),
            )
        case "commit_answer":
            answer = envelope.commit_answer
            return CommitAnswer(
                key_from_wire(answer),
                answer.lease_id,
                attempt_from_wire(answer),
                answer.ok,
                answer.reason,
            )
        case "commit_seen":
            seen = envelope.commit_seen
            return CommitSeen(key_from_wire(seen), seen.lease_id, attempt_from_wire(seen))
        case "ask_lease":
            return ask_lease_from_wire(envelope.ask_lease)
        case "take_over":
            return take_over_from_wire(envelope.take_over)
        case "lease_refused":
            refused = envelope.lease_refused
            return LeaseRefused(
                key_from_wire(refused), request_number_from_wire(refused, "request_number")
            )
        case "lease_loading":
            loading = envelope.lease_loading
            return LeaseLoading(
                key_from_wire(loading),
                request_number_from_wire(loading, "request_number"),
                loading.num_blocks,
            )
        case "withdraw_lease":
            withdraw = envelope.withdraw_lease
            return WithdrawLease(
                key_from_wire(withdraw), request_number_from_wire(withdraw), withdraw.reason
            )
        case "ended":
            return Ended(key_from_wire(envelope.ended), envelope.ended.reason)
        case "wrong_epoch":
            require_text(envelope.wrong_epoch, "expected_epoch")
            return WrongEpoch(envelope.wrong_epoch.expected_epoch)
        case _:
            raise malformed(envelope, "message", "is missing or of an unknown kind")


def _hello_to_wire(hello: PeerHello) -> peer_pb2.PeerHello:
    return peer_pb2.PeerHello(
        contract=contract_to_wire(hello.contract),
        address=hello.address,
        pools=[
            peer_pb2.PoolInfo(
                transport_metadata=pool.transport_metadata,
                pool_address=pool.pool_address,
                num_blocks=pool.num_blocks,
                block_bytes=pool.block_bytes,
                memory_kind=pool.memory_kind,
                device_id=pool.device_id,
            )
            for pool in hello.pools
        ],
    )


def _hello_from_wire(wire: peer_pb2.PeerHello) -> PeerHello:
    require_text(wire, "address")
    contract = contract_from_wire(wire)
    if len(wire.pools) != contract.num_ranks:
        raise malformed(wire, "pools", f"has {len(wire.pools)} for {contract.num_ranks} ranks")
    return PeerHello(contract, wire.address, tuple(map(_pool_from_wire, wire.pools)))


def _pool_from_wire(wire: peer_pb2.PoolInfo) -> PoolInfo:
    if wire.memory_kind not in MEMORY_KINDS:
        raise malformed(wire, "memory_kind", f"is {wire.memory_kind!r}, not DRAM or VRAM")
    for field in ("num_blocks", "block_bytes"):
        if not getattr(wire, field):
            raise malformed(wire, field, "is 0")
    return PoolInfo(
        transport_metadata=wire.transport_metadata,
        pool_address=wire.pool_address,
        num_blocks=wire.num_blocks,
        block_bytes=wire.block_bytes,
        memory_kind=wire.memory_kind,
        device_id=wire.device_id,
    )
