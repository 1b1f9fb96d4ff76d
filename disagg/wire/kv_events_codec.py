"""KV events and snapshots on the wire."""

from typing import assert_never

from disagg.messages.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
    KVSnapshot,
    SnapshotPart,
    TierCleared,
    TierRemoved,
    TierStored,
)
from disagg.wire.checks import (
    HASH_BYTES,
    cut_hashes,
    join_hashes,
    malformed,
    require_text,
    split_hashes,
)
from disagg.wire.v1 import kv_events_pb2


def kv_batch_to_wire(epoch: str, batch: KVEventBatch | KVSnapshot) -> kv_events_pb2.KvEventBatch:
    """Encode numbered events, or a snapshot that replaces everything before it."""
    if isinstance(batch, KVSnapshot):
        snapshot = kv_events_pb2.KvSnapshot(
            hashes=[join_hashes(group) for group in batch.hashes],
            tiers=map(_tier_blocks_to_wire, batch.tiers),
            part=batch.part.number,
            num_parts=batch.part.num_parts,
        )
        return kv_events_pb2.KvEventBatch(
            epoch=epoch, first_sequence=batch.next_seq, snapshot=snapshot
        )
    events = [_event_to_wire(event) for event in batch.events]
    return kv_events_pb2.KvEventBatch(epoch=epoch, first_sequence=batch.first_seq, events=events)


def kv_batch_from_wire(wire: kv_events_pb2.KvEventBatch) -> tuple[str, KVEventBatch | KVSnapshot]:
    """Decode a batch.

    Returns:
        The publisher's epoch, and its events or its snapshot.

    Raises:
        ProtocolError: a field is missing or malformed, or a kind of event is unknown.
    """
    require_text(wire, "epoch")
    if wire.HasField("snapshot"):
        if wire.events:
            raise malformed(wire, "events", "accompany a snapshot")
        groups = tuple(cut_hashes(wire.snapshot, "hashes", g) for g in wire.snapshot.hashes)
        tiers = tuple(_tier_stored_from_wire(one) for one in wire.snapshot.tiers)
        part = SnapshotPart(wire.snapshot.part, wire.snapshot.num_parts or 1)
        if part.number >= part.num_parts:
            raise malformed(wire.snapshot, "part", f"is {part.number} of {part.num_parts}")
        return wire.epoch, KVSnapshot(wire.first_sequence, groups, tiers, part)
    events = tuple(_event_from_wire(event) for event in wire.events)
    return wire.epoch, KVEventBatch(wire.first_sequence, events)


def _event_to_wire(event: KVEvent) -> kv_events_pb2.KvEvent:
    match event:
        case BlocksStored():
            stored = kv_events_pb2.BlocksStored(
                group=event.group,
                hashes=join_hashes(event.hashes),
                parent_hash=b"" if event.parent_hash is None else join_hashes([event.parent_hash]),
                first_position=event.first_position,
                block_tokens=event.block_tokens,
                token_ids=event.token_ids,
            )
            return kv_events_pb2.KvEvent(stored=stored)
        case BlocksRemoved(group, hashes):
            return kv_events_pb2.KvEvent(
                removed=kv_events_pb2.BlocksRemoved(group=group, hashes=join_hashes(hashes))
            )
        case AllCleared():
            return kv_events_pb2.KvEvent(cleared=kv_events_pb2.AllBlocksCleared())
        case TierStored():
            return kv_events_pb2.KvEvent(tier_stored=_tier_blocks_to_wire(event))
        case TierRemoved():
            return kv_events_pb2.KvEvent(tier_removed=_tier_blocks_to_wire(event))
        case TierCleared(tier):
            return kv_events_pb2.KvEvent(tier_cleared=kv_events_pb2.TierCleared(tier=tier))
        case _:
            assert_never(event)


def _event_from_wire(wire: kv_events_pb2.KvEvent) -> KVEvent:
    match wire.WhichOneof("event"):
        case "stored":
            return _stored_from_wire(wire.stored)
        case "removed":
            return BlocksRemoved(wire.removed.group, split_hashes(wire.removed, "hashes"))
        case "cleared":
            return AllCleared()
        case "tier_stored":
            return _tier_stored_from_wire(wire.tier_stored)
        case "tier_removed":
            gone = wire.tier_removed
            return TierRemoved(gone.tier, gone.group, split_hashes(gone, "hashes"))
        case "tier_cleared":
            return TierCleared(wire.tier_cleared.tier)
        case _:
            raise malformed(wire, "event", "is missing or of an unknown kind")


def _tier_blocks_to_wire(event: TierStored | TierRemoved) -> kv_events_pb2.TierBlocks:
    return kv_events_pb2.TierBlocks(
        tier=event.tier, group=event.group, hashes=join_hashes(event.hashes)
    )


def _tier_stored_from_wire(wire: kv_events_pb2.TierBlocks) -> TierStored:
    return TierStored(wire.tier, wire.group, split_hashes(wire, "hashes"))


def _stored_from_wire(wire: kv_events_pb2.BlocksStored) -> BlocksStored:
    if len(wire.parent_hash) not in (0, HASH_BYTES):
        what = f"has {len(wire.parent_hash)} bytes, not 0 or {HASH_BYTES}"
        raise malformed(wire, "parent_hash", what)
    if not wire.block_tokens:
        raise malformed(wire, "block_tokens", "is 0")
    hashes = split_hashes(wire, "hashes")
    if len(wire.token_ids) not in (0, len(hashes) * wire.block_tokens):
        what = f"has {len(wire.token_ids)} entries for {len(hashes)} blocks of {wire.block_tokens}"
        raise malformed(wire, "token_ids", what)
    return BlocksStored(
        group=wire.group,
        hashes=hashes,
        parent_hash=wire.parent_hash or None,
        first_position=wire.first_position,
        block_tokens=wire.block_tokens,
        token_ids=tuple(wire.token_ids),
    )
