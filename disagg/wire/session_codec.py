"""Messages between the router and a worker on the wire."""

import re
from typing import assert_never

from disagg.messages.outputs import StepOutputs
from disagg.messages.reports import PrefillReport, TransferReport
from disagg.messages.session import (
    CLAIM_BYTES,
    CallOffDrain,
    Cancel,
    Claim,
    Drain,
    EndReason,
    PartEnded,
    PrefillProgress,
    PrefixCacheReset,
    ResetPrefixCache,
    Superseded,
    ToRouterMessage,
    ToWorkerMessage,
    WorkerIdClaimed,
)
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Submit
from disagg.wire.checks import NAME_CHARS_MAX, enum_value, malformed, require_line, to_line
from disagg.wire.identity_codec import (
    incarnation_from_wire,
    incarnation_to_wire,
    key_from_wire,
    key_to_wire,
)
from disagg.wire.outputs_codec import outputs_from_wire, outputs_to_wire
from disagg.wire.reports_codec import (
    prefill_from_wire,
    prefill_to_wire,
    transfer_from_wire,
    transfer_to_wire,
)
from disagg.wire.stats_codec import stats_from_wire, stats_to_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.submit_codec import (
    address_from_wire,
    put_address,
    submit_from_wire,
    submit_to_wire,
)
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
            put_address(claimed.id_claimed.claimant, claimant)
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
            return submit_from_wire(request.submit, router)
        case "cancel":
            return Cancel(key_from_wire(request.cancel, router=router), request.cancel.reason)
        case "reset":
            return ResetPrefixCache(request.reset.number, request.reset.router or router)
        case "id_claimed":
            return WorkerIdClaimed(address_from_wire(request.id_claimed.claimant))
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
        case PrefillProgress(key, num_computed_tokens, preempted):
            progress = session_pb2.PrefillProgress(
                key=key_to_wire(key), num_computed_tokens=num_computed_tokens, preempted=preempted
            )
            return session_pb2.SessionResponse(progress=progress)
        case PrefillReport():
            return session_pb2.SessionResponse(prefill=prefill_to_wire(message))
        case TransferReport():
            return session_pb2.SessionResponse(transfer=transfer_to_wire(message))
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
            return PrefillProgress(key, progress.num_computed_tokens, progress.preempted)
        case "prefill":
            return prefill_from_wire(response.prefill, router)
        case "transfer":
            return transfer_from_wire(response.transfer, router)
        case "stats":
            return stats_from_wire(response.stats)
        case "reset":
            reset = response.reset
            require_line(reset, "router", NAME_CHARS_MAX)
            held, refused = tuple(sorted(reset.in_use.items())), to_line(reset.refused)
            return PrefixCacheReset(
                reset.number, reset.num_forgotten, held, refused, reset.router or router
            )
        case "superseded":
            return Superseded(key_from_wire(response.superseded, router=router))
        case _:
            raise malformed(response, "message", "is missing or of an unknown kind")
