"""Messages between the router and a worker on the wire."""

from typing import assert_never

from disagg.messages.outputs import StepOutputs
from disagg.messages.session import (
    RESIDENCY_BOUNDS_MS,
    Cancel,
    EndReason,
    GroupTransfer,
    PartEnded,
    PeerAddress,
    PrefillProgress,
    PrefillReport,
    PrefixCacheReset,
    PullPlan,
    ResetPrefixCache,
    ResidencyHistogram,
    Role,
    Submit,
    ToRouterMessage,
    ToWorkerMessage,
    TransferKind,
    TransferReport,
    WorkerIdClaimed,
    WorkerStats,
)
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
    incarnation_to_wire,
    key_from_wire,
    key_to_wire,
)
from disagg.wire.outputs_codec import outputs_from_wire, outputs_to_wire
from disagg.wire.sampling_codec import sampling_from_wire, sampling_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import session_pb2


def session_request_to_wire(message: ToWorkerMessage | SessionOpen) -> session_pb2.SessionRequest:
    """Encode a message of the router to a worker."""
    match message:
        case SessionOpen(router_id, worker):
            opening = session_pb2.SessionOpen(
                router_id=router_id, worker=incarnation_to_wire(worker)
            )
            return session_pb2.SessionRequest(open=opening)
        case Submit():
            return session_pb2.SessionRequest(submit=_submit_to_wire(message))
        case Cancel(key, reason):
            return session_pb2.SessionRequest(
                cancel=session_pb2.Cancel(key=key_to_wire(key), reason=reason)
            )
        case ResetPrefixCache(number):
            return session_pb2.SessionRequest(reset=session_pb2.ResetPrefixCache(number=number))
        case WorkerIdClaimed(claimant):
            claimed = session_pb2.WorkerIdClaimed(claimant=_address_to_wire(claimant))
            return session_pb2.SessionRequest(id_claimed=claimed)
        case _:
            assert_never(message)


def session_request_from_wire(request: session_pb2.SessionRequest) -> ToWorkerMessage | SessionOpen:
    """Decode a message of the router to a worker.

    Raises:
        ProtocolError: a field is missing or malformed, or the kind of message is unknown.
    """
    match request.WhichOneof("message"):
        case "open":
            require_text(request.open, "router_id")
            worker = incarnation_from_wire(request.open, "worker")
            return SessionOpen(request.open.router_id, worker)
        case "submit":
            return _submit_from_wire(request.submit)
        case "cancel":
            return Cancel(key_from_wire(request.cancel), request.cancel.reason)
        case "reset":
            return ResetPrefixCache(request.reset.number)
        case "id_claimed":
            return WorkerIdClaimed(_address_from_wire(request.id_claimed.claimant))
        case _:
            raise malformed(request, "message", "is missing or of an unknown kind")


def session_response_to_wire(message: ToRouterMessage) -> session_pb2.SessionResponse:
    """Encode a message of a worker to the router."""
    match message:
        case StepOutputs():
            return session_pb2.SessionResponse(outputs=outputs_to_wire(message))
        case PartEnded(key, reason, text):
            ended = session_pb2.PartEnded(key=key_to_wire(key), reason=reason.value, message=text)
            return session_pb2.SessionResponse(part_ended=ended)
        case PrefillProgress(key, num_computed_tokens):
            progress = session_pb2.PrefillProgress(
                key=key_to_wire(key), num_computed_tokens=num_computed_tokens
            )
            return session_pb2.SessionResponse(progress=progress)
        case PrefillReport():
            prefill = session_pb2.PrefillReport(
                key=key_to_wire(message.key),
                num_prompt_tokens=message.num_prompt_tokens,
                hit_tokens=message.hit_tokens,
                computed_tokens=message.computed_tokens,
                pulled_tokens=message.pulled_tokens,
                uncached_common_tokens=message.uncached_common_tokens,
            )
            return session_pb2.SessionResponse(prefill=prefill)
        case TransferReport():
            return session_pb2.SessionResponse(transfer=_transfer_to_wire(message))
        case WorkerStats():
            return session_pb2.SessionResponse(stats=stats_to_wire(message))
        case PrefixCacheReset(number, num_forgotten, in_use, refused):
            reset = session_pb2.PrefixCacheReset(
                number=number,
                num_forgotten=num_forgotten,
                in_use=dict(in_use),
                refused=refused,
            )
            return session_pb2.SessionResponse(reset=reset)
        case _:
            assert_never(message)


def session_response_from_wire(response: session_pb2.SessionResponse) -> ToRouterMessage:
    """Decode a message of a worker to the router.

    Raises:
        ProtocolError: a field is missing or malformed, or the kind of message is unknown.
    """
    match response.WhichOneof("message"):
        case "outputs":
            return outputs_from_wire(response.outputs)
        case "part_ended":
            ended = response.part_ended
            reason = enum_value(EndReason, ended, "reason")
            return PartEnded(key_from_wire(ended), reason, ended.message)
        case "progress":
            progress = response.progress
            return PrefillProgress(key_from_wire(progress), progress.num_computed_tokens)
        case "prefill":
            prefill = response.prefill
            return PrefillReport(
                key_from_wire(prefill),
                prefill.num_prompt_tokens,
                prefill.hit_tokens,
                prefill.computed_tokens,
                prefill.pulled_tokens,
                prefill.uncached_common_tokens,
            )
        case "transfer":
            return _transfer_from_wire(response.transfer)
        case "stats":
            return stats_from_wire(response.stats)
        case "reset":
            reset = response.reset
            held = tuple(sorted(reset.in_use.items()))
            return PrefixCacheReset(reset.number, reset.num_forgotten, held, reset.refused)
        case _:
            raise malformed(response, "message", "is missing or of an unknown kind")


def stats_to_wire(stats: WorkerStats) -> session_pb2.WorkerStats:
    """Encode a worker's load; also part of its status."""
    return session_pb2.WorkerStats(
        num_waiting=stats.num_waiting,
        num_running=stats.num_running,
        num_prefill_tokens_queued=stats.num_prefill_tokens_queued,
        num_blocks_usable=stats.num_blocks_usable,
        num_blocks_free=stats.num_blocks_free,
        num_leases=stats.num_leases,
        num_reservations=stats.num_reservations,
        num_inbound=stats.num_inbound,
        num_blocks_quarantined=stats.num_blocks_quarantined,
        ready=stats.ready,
        counters=dict(stats.counters),
        residency=[
            session_pb2.ResidencyHistogram(name=one.name, counts=one.counts, sum_ms=one.sum_ms)
            for one in stats.residency
        ],
    )


def stats_from_wire(wire: session_pb2.WorkerStats) -> WorkerStats:
    """Decode a worker's load; counters come sorted by name."""
    return WorkerStats(
        num_waiting=wire.num_waiting,
        num_running=wire.num_running,
        num_prefill_tokens_queued=wire.num_prefill_tokens_queued,
        num_blocks_usable=wire.num_blocks_usable,
        num_blocks_free=wire.num_blocks_free,
        num_leases=wire.num_leases,
        num_reservations=wire.num_reservations,
        num_inbound=wire.num_inbound,
        num_blocks_quarantined=wire.num_blocks_quarantined,
        ready=wire.ready,
        counters=tuple(sorted(wire.counters.items())),
        residency=tuple(_residency_from_wire(one) for one in wire.residency),
    )


def _residency_from_wire(wire: session_pb2.ResidencyHistogram) -> ResidencyHistogram:
    if len(wire.counts) != len(RESIDENCY_BOUNDS_MS) + 1:
        raise malformed(wire, "counts", f"has {len(wire.counts)} entries")
    return ResidencyHistogram(wire.name, tuple(wire.counts), wire.sum_ms)


def _submit_to_wire(submit: Submit) -> session_pb2.Submit:
    pull = None
    if submit.pull is not None:
        owner = _address_to_wire(submit.pull.owner)
        pull = session_pb2.PullPlan(owner=owner, num_tokens=submit.pull.num_tokens)
    return session_pb2.Submit(
        key=key_to_wire(submit.key),
        role=submit.role.value,
        token_ids=submit.token_ids,
        hashes=join_hashes(submit.hashes),
        cache_salt=submit.cache_salt,
        sampling=sampling_to_wire(submit.sampling),
        peer=None if submit.peer is None else _address_to_wire(submit.peer),
        pull=pull,
        take_over=None if submit.take_over is None else key_to_wire(submit.take_over),
    )


def _address_to_wire(address: PeerAddress) -> session_pb2.PeerAddress:
    incarnation = incarnation_to_wire(address.incarnation)
    return session_pb2.PeerAddress(incarnation=incarnation, address=address.address)


def _address_from_wire(wire: session_pb2.PeerAddress) -> PeerAddress:
    require_text(wire, "address")
    return PeerAddress(incarnation_from_wire(wire, "incarnation"), wire.address)


def _submit_from_wire(wire: session_pb2.Submit) -> Submit:
    role = enum_value(Role, wire, "role")
    if not wire.token_ids:
        raise malformed(wire, "token_ids", "is empty")
    peer = _address_from_wire(wire.peer) if wire.HasField("peer") else None
    pull = None
    if wire.HasField("pull"):
        require_set(wire.pull, "owner")
        pull = PullPlan(_address_from_wire(wire.pull.owner), wire.pull.num_tokens)
    for field, forbidden in (("pull", role is Role.DECODE), ("take_over", role is not Role.DECODE)):
        if forbidden and wire.HasField(field):  # type: ignore[arg-type]
            raise malformed(wire, field, f"is set for role {role}")
    if (peer is None) != (role is Role.LOCAL):
        raise malformed(wire, "peer", f"is {'missing' if peer is None else 'set'} for role {role}")
    return Submit(
        key=key_from_wire(wire),
        role=role,
        token_ids=tuple(wire.token_ids),
        hashes=split_hashes(wire, "hashes"),
        cache_salt=wire.cache_salt,
        sampling=sampling_from_wire(wire),
        peer=peer,
        pull=pull,
        take_over=key_from_wire(wire, "take_over") if wire.HasField("take_over") else None,
    )


def _transfer_to_wire(report: TransferReport) -> session_pb2.TransferReport:
    return session_pb2.TransferReport(
        key=key_to_wire(report.key),
        owner=incarnation_to_wire(report.owner),
        groups=[
            session_pb2.GroupTransfer(
                group=g.group,
                kind=g.kind,
                window_tokens=g.window_tokens,
                block_tokens=g.block_tokens,
                block_map=g.block_map,
                pulled_blocks=g.pulled_blocks,
                pulled_bytes=g.pulled_bytes,
                useful_bytes=g.useful_bytes,
                full_blocks=g.full_blocks,
                full_bytes=g.full_bytes,
            )
            for g in report.groups
        ],
        num_reads=report.num_reads,
        read_ms=report.read_ms,
        exposed_ms=report.exposed_ms,
        kind=report.kind.value,
        num_tokens=report.num_tokens,
        failed=report.failed,
    )


def _transfer_from_wire(wire: session_pb2.TransferReport) -> TransferReport:
    return TransferReport(
        key=key_from_wire(wire),
        owner=incarnation_from_wire(wire, "owner"),
        groups=tuple(
            GroupTransfer(
                group=g.group,
                kind=g.kind,
                window_tokens=g.window_tokens,
                block_tokens=g.block_tokens,
                block_map=g.block_map,
                pulled_blocks=g.pulled_blocks,
                pulled_bytes=g.pulled_bytes,
                useful_bytes=g.useful_bytes,
                full_blocks=g.full_blocks,
                full_bytes=g.full_bytes,
            )
            for g in wire.groups
        ),
        num_reads=wire.num_reads,
        read_ms=wire.read_ms,
        exposed_ms=wire.exposed_ms,
        kind=enum_value(TransferKind, wire, "kind"),
        num_tokens=wire.num_tokens,
        failed=wire.failed,
    )
