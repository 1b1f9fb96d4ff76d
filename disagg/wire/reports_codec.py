"""Reports of a worker on the wire."""

from dataclasses import fields
from typing import Any

from disagg.messages.reports import (
    GroupTransfer,
    PrefillReport,
    PrefillTimes,
    TransferKind,
    TransferReport,
)
from disagg.wire.checks import NAME_CHARS_MAX, enum_value, malformed, require_line, to_line
from disagg.wire.identity_codec import (
    incarnation_from_wire,
    incarnation_to_wire,
    key_from_wire,
    key_to_wire,
)
from disagg.wire.v1 import session_pb2

POSITIONS_MAX = 1 << 20
"""Blocks of a sequence: of 16 tokens each, 16 million tokens."""


def prefill_to_wire(report: PrefillReport) -> session_pb2.PrefillReport:
    """Encode what a prefill found."""
    return session_pb2.PrefillReport(
        key=key_to_wire(report.key),
        num_prompt_tokens=report.num_prompt_tokens,
        hit_tokens=report.hit_tokens,
        computed_tokens=report.computed_tokens,
        pulled_tokens=report.pulled_tokens,
        uncached_common_tokens=report.uncached_common_tokens,
        times=None if report.times is None else _times_to_wire(report.times),
    )


def prefill_from_wire(wire: session_pb2.PrefillReport, router: str) -> PrefillReport:
    """Decode what a prefill of a router's found.

    Raises:
        ProtocolError: a field is missing or malformed.
    """
    return PrefillReport(
        key_from_wire(wire, router=router),
        wire.num_prompt_tokens,
        wire.hit_tokens,
        wire.computed_tokens,
        wire.pulled_tokens,
        wire.uncached_common_tokens,
        _times_from_wire(wire.times) if wire.HasField("times") else None,
    )


def transfer_to_wire(report: TransferReport) -> session_pb2.TransferReport:
    """Encode what was moved."""
    return session_pb2.TransferReport(
        key=key_to_wire(report.key),
        owner=incarnation_to_wire(report.owner),
        groups=[session_pb2.GroupTransfer(**_group_fields(one)) for one in report.groups],
        num_reads=report.num_reads,
        read_ms=report.read_ms,
        exposed_ms=report.exposed_ms,
        kind=report.kind.value,
        num_tokens=report.num_tokens,
        num_bursts=report.num_bursts,
        reading_ms=report.reading_ms,
        failed=report.failed,
    )


def transfer_from_wire(wire: session_pb2.TransferReport, router: str) -> TransferReport:
    """Decode what was moved for a generation of a router's.

    Raises:
        ProtocolError: a field is missing or malformed.
    """
    return TransferReport(
        key=key_from_wire(wire, router=router),
        owner=incarnation_from_wire(wire, "owner"),
        groups=tuple(_group_from_wire(one) for one in wire.groups),
        num_reads=wire.num_reads,
        read_ms=wire.read_ms,
        exposed_ms=wire.exposed_ms,
        kind=enum_value(TransferKind, wire, "kind"),
        num_tokens=wire.num_tokens,
        num_bursts=wire.num_bursts,
        reading_ms=wire.reading_ms,
        failed=to_line(wire.failed),
    )


def _group_from_wire(wire: session_pb2.GroupTransfer) -> GroupTransfer:
    require_line(wire, "kind", NAME_CHARS_MAX)
    if len(wire.block_map) > POSITIONS_MAX:  # the router keeps it for a while
        raise malformed(wire, "block_map", f"has more than {POSITIONS_MAX} positions")
    return GroupTransfer(**_group_fields(wire))


def _group_fields(group: GroupTransfer | session_pb2.GroupTransfer) -> dict[str, Any]:
    """What both kinds have under the same names."""
    return {one.name: getattr(group, one.name) for one in fields(GroupTransfer)}


def _times_to_wire(times: PrefillTimes) -> session_pb2.PrefillTimes:
    return session_pb2.PrefillTimes(
        queue_ms=times.queue_ms, transfer_ms=times.transfer_ms, compute_ms=times.compute_ms
    )


def _times_from_wire(wire: session_pb2.PrefillTimes) -> PrefillTimes:
    return PrefillTimes(wire.queue_ms, wire.transfer_ms, wire.compute_ms)
