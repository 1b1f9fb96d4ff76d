"""Messages between the router and a worker on the wire."""

import re
from typing import assert_never

from disagg.messages.outputs import StepOutputs
from disagg.messages.session import (
    CLAIM_BYTES,
    CallOffDrain,
    Cancel,
    Claim,
    Drain,
    EndReason,
    GroupTransfer,
    PartEnded,
    PeerAddress,
    PrefillProgress,
    PrefillReport,
    PrefillTimes,
    PrefixCacheReset,
    PullPlan,
    ResetPrefixCache,
    Role,
    Submit,
    Superseded,
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
    to_line,
)
from disagg.wire.identity_codec import (
    incarnation_from_wire,
    incarnation_to_wire,
    key_from_wire,
    key_to_wire,
    put_incarnation,
    put_key,
)
from disagg.wire.outputs_codec import outputs_from_wire, outputs_to_wire
from disagg.wire.sampling_codec import put_sampling, sampling_from_wire
from disagg.wire.stats_codec import stats_from_wire, stats_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import session_pb2

_ROUTER_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def session_request_to_wire(message: ToWorkerMessage | SessionOpen) -> session_pb2.SessionRequest:
    """Encode a message of the router to a worker."""
    match message:
        case SessionOpen(router_id, worker, takes_batches):
            opening = session_pb2.SessionOpen(
                router_id=router_id,
                worker=incarnation_to_wire(worker),
                takes_batches=takes_batches,
            )
            return session_pb2.SessionRequest(open=opening)
        case Submit():
            return submit_to_wire(message)
        case Cancel(key, reason):
            return session_pb2.SessionRequest(
                cancel=session_pb2.Cancel(key=key_to_wire(key), reason=reason)
            )
        case WorkerIdClaimed(claimant):
            claimed = session_pb2.SessionRequest()
            _put_address(claimed.id_claimed.claimant, claimant)
            return claimed
        case ResetPrefixCache(number, router):
            order = session_pb2.ResetPrefixCache(number=number, router=router)
            return session_pb2.SessionRequest(reset=order)
        case Claim(key, name, accepted_ms, again, waited_ms):
            return session_pb2.SessionRequest(
                claim=session_pb2.Claim(
                    key=key_to_wire(key),
                    name=name,
                    accepted_ms=accepted_ms,
                    again=again,
                    waited_ms=waited_ms,
                )
            )
        case Drain(timeout_ms, ends):
            return session_pb2.SessionRequest(
                drain=session_pb2.Drain(timeout_ms=timeout_ms, ends=ends)
            )
        case CallOffDrain():
            return session_pb2.SessionRequest(call_off_drain=session_pb2.CallOffDrain())
        case _:
            assert_never(message)


def session_request_from_wire(
    request: session_pb2.SessionRequest, router: str = ""
) -> ToWorkerMessage | SessionOpen:
    """Decode a message of a router to a worker.

    Args:
        request: the message.
        router: whose session it came on; all it says is of that router's requests.

    Raises:
        ProtocolError: a field is missing or malformed, or the kind of message is unknown.
    """
    match request.WhichOneof("message"):
        case "open":
            check_router_id(request.open)
            worker = incarnation_from_wire(request.open, "worker")
            return SessionOpen(request.open.router_id, worker, request.open.takes_batches)
        case "submit":
            return _submit_from_wire(request.submit, router)
        case "cancel":
            return Cancel(key_from_wire(request.cancel, router=router), request.cancel.reason)
        case "reset":
            return ResetPrefixCache(request.reset.number, request.reset.router or router)
        case "id_claimed":
            return WorkerIdClaimed(_address_from_wire(request.id_claimed.claimant))
        case "claim":
            claim = request.claim
            if len(claim.name) != CLAIM_BYTES:
                raise malformed(claim, "name", f"has {len(claim.name)} bytes")
            key = key_from_wire(claim, router=router)
            return Claim(key, claim.name, claim.accepted_ms, claim.again, claim.waited_ms)
        case "drain":
            return Drain(request.drain.timeout_ms, request.drain.ends)
        case "call_off_drain":
            return CallOffDrain()
        case _:
            raise malformed(request, "message", "is missing or of an unknown kind")


def check_router_id(opening: session_pb2.SessionOpen) -> None:
    """Refuse what cannot be a router's id: it is logged, and a part of names.

    Raises:
        ProtocolError: it is missing, too long, or has other characters.
    """
    if not _ROUTER_ID.fullmatch(opening.router_id):
        raise malformed(opening, "router_id", "is not 1 to 128 letters, digits or any of . _ : -")


def session_response_to_wire(message: ToRouterMessage) -> session_pb2.SessionResponse:
    """Encode a message of a worker to the router."""
    match message:
        case StepOutputs():
            return session_pb2.SessionResponse(outputs=outputs_to_wire(message))
        case PartEnded(key, reason, text, num_kept):
            ended = session_pb2.PartEnded(
                key=key_to_wire(key), reason=reason.value, message=text, num_kept_tokens=num_kept
            )
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
                times=None if message.times is None else _times_to_wire(message.times),
            )
            return session_pb2.SessionResponse(prefill=prefill)
        case TransferReport():
            return session_pb2.SessionResponse(transfer=_transfer_to_wire(message))
        case WorkerStats():
            return session_pb2.SessionResponse(stats=stats_to_wire(message))
        case PrefixCacheReset(number, num_forgotten, in_use, refused, router):
            reset = session_pb2.PrefixCacheReset(
                number=number,
                num_forgotten=num_forgotten,
                in_use=dict(in_use),
                refused=refused,
                router=router,
            )
            return session_pb2.SessionResponse(reset=reset)
        case Superseded(key):
            superseded = session_pb2.Superseded(key=key_to_wire(key))
            return session_pb2.SessionResponse(superseded=superseded)
        case _:
            assert_never(message)


def session_response_from_wire(
    response: session_pb2.SessionResponse, router: str = ""
) -> ToRouterMessage:
    """Decode a message of a worker to a router.

    Args:
        response: the message.
        router: whose session it came on; all it says is of that router's requests.

    Raises:
        ProtocolError: a field is missing or malformed, or the kind of message is unknown.
    """
    match response.WhichOneof("message"):
        case "outputs":
            return outputs_from_wire(response.outputs, router)
        case "part_ended":
            ended = response.part_ended
            reason = enum_value(EndReason, ended, "reason")
            key = key_from_wire(ended, router=router)
            return PartEnded(key, reason, to_line(ended.message), ended.num_kept_tokens)
        case "progress":
            progress = response.progress
            key = key_from_wire(progress, router=router)
            return PrefillProgress(key, progress.num_computed_tokens)
        case "prefill":
            prefill = response.prefill
            return PrefillReport(
                key_from_wire(prefill, router=router),
                prefill.num_prompt_tokens,
                prefill.hit_tokens,
                prefill.computed_tokens,
                prefill.pulled_tokens,
                prefill.uncached_common_tokens,
                _times_from_wire(prefill.times) if prefill.HasField("times") else None,
            )
        case "transfer":
            return _transfer_from_wire(response.transfer, router)
        case "stats":
            return stats_from_wire(response.stats)
        case "reset":
            reset = response.reset
            held = tuple(sorted(reset.in_use.items()))
            return PrefixCacheReset(
                reset.number, reset.num_forgotten, held, reset.refused, reset.router or router
            )
        case "superseded":
            return Superseded(key_from_wire(response.superseded, router=router))
        case _:
            raise malformed(response, "message", "is missing or of an unknown kind")


def _times_to_wire(times: PrefillTimes) -> session_pb2.PrefillTimes:
    return session_pb2.PrefillTimes(
        queue_ms=times.queue_ms, transfer_ms=times.transfer_ms, compute_ms=times.compute_ms
    )


def _times_from_wire(wire: session_pb2.PrefillTimes) -> PrefillTimes:
    return PrefillTimes(wire.queue_ms, wire.transfer_ms, wire.compute_ms)


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
        _put_address(wire.peer, submit.peer)
    if submit.pull is not None:
        _put_address(wire.pull.owner, submit.pull.owner)
        wire.pull.num_tokens = submit.pull.num_tokens
    if submit.take_over is not None:
        put_key(wire.take_over, submit.take_over)
    return request


def _put_address(wire: session_pb2.PeerAddress, address: PeerAddress) -> None:
    put_incarnation(wire.incarnation, address.incarnation)
    wire.address = address.address


def _address_from_wire(wire: session_pb2.PeerAddress) -> PeerAddress:
    require_text(wire, "address")
    return PeerAddress(incarnation_from_wire(wire, "incarnation"), wire.address)


def _submit_from_wire(wire: session_pb2.Submit, router: str) -> Submit:
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


def _transfer_from_wire(wire: session_pb2.TransferReport, router: str) -> TransferReport:
    return TransferReport(
        key=key_from_wire(wire, router=router),
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
