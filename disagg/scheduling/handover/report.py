"""The reader's report of a transfer to the router."""

from disagg.kv.blocks.hits import ExternalReservation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.reports import GroupTransfer, TransferKind, TransferReport
from disagg.messages.session import PrefillProgress
from disagg.transfer.actions import InboundStats

_HAD = b".h" + bytes(254)
"""The null block is 0."""
_PULLED = ord("p")


def read_progress(
    key: RequestKey, reservation: ExternalReservation, num_blocks_read: int, own_tokens: int = 0
) -> PrefillProgress:
    """How far a transfer is, in tokens: of those that are pulled the share that has been read."""
    num_blocks = max(1, sum(map(len, reservation.lacks)))
    num_pulled = reservation.num_external_tokens - own_tokens
    return PrefillProgress(key, own_tokens + num_pulled * num_blocks_read // num_blocks)


def committed_report(
    kv: KVCacheCoordinator,
    key: RequestKey,
    owner: Incarnation,
    kind: TransferKind,
    reservation: ExternalReservation,
    stats: InboundStats,
) -> TransferReport:
    """What a committed transfer moved, per group, and what of it was there already.

    To be made while the sequence still has the tables that were reserved for it.
    """
    num_tokens = reservation.num_external_tokens
    block_bytes = kv.layout.block_bytes
    groups = []
    for group, table, lacks in zip(
        kv.layout.groups, kv.tables.blocks(key), reservation.lacks, strict=True
    ):
        num_positions = kv.managers[group.group].num_blocks(num_tokens)
        block_map = bytearray(map(bool, table[:num_positions])).translate(_HAD)
        for position, _ in lacks:
            block_map[position] = _PULLED
        groups.append(
            GroupTransfer(
                group=group.group,
                kind=group.spec.kind,
                window_tokens=group.spec.window_tokens,
                block_tokens=group.spec.block_tokens,
                block_map=block_map.decode(),
                pulled_blocks=len(lacks),
                pulled_bytes=len(lacks) * block_bytes,
                useful_bytes=len(lacks) * kv.layout.useful_bytes(group.group),
                full_blocks=num_positions,
                full_bytes=num_positions * block_bytes,
            )
        )
    return TransferReport(
        key=key,
        owner=owner,
        groups=tuple(groups),
        num_reads=stats.num_reads,
        read_ms=stats.read_ms,
        exposed_ms=stats.exposed_ms,
        kind=kind,
        num_tokens=num_tokens,
        num_bursts=stats.num_bursts,
        reading_ms=stats.reading_ms,
    )


def failed_report(key: RequestKey, owner: Incarnation, why: str) -> TransferReport:
    """A prefix pull that was given up."""
    return TransferReport(key, owner, (), 0, 0, 0, TransferKind.PREFIX, failed=why)


def pulled_bytes(report: TransferReport) -> int:
    """Bytes that were pulled, over all groups."""
    return sum(group.pulled_bytes for group in report.groups)
