"""What vLLM's KV events say, read from unpacked messages; unpacking and sockets are a shell's.

The fields were read from vLLM 0.32.0's ``distributed/kv_events.py``. Such events are maps with a
``type``; fields at their default are absent, and fields that are not known here are passed over.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from disagg.errors import ProtocolError

BlockHash = int | bytes
"""How vLLM names a block, the same in all groups: 64 bits of a digest, or all of it."""
READABLE = ("GPU", None)
"""Media of blocks that a forward pass can read; others are tiers of that server."""
GROUPS_MAX = 64
HASH_BYTES_MAX = 64
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class VllmStored:
    """Blocks of one group became findable.

    Attributes:
        group: KV cache group.
        kind: vLLM's name for its kind.
        window_tokens: 0 where the kind has none.
        block_tokens: tokens per block.
        hashes: of the blocks, in order. Fewer than ``token_ids`` fill where some were not cached.
        parent: of the block before ``token_ids``; None at the start of a sequence.
        token_ids: whole blocks, in order.
        cache_salt: what the first block was hashed with; "" for none.
        has_other_keys: the KV depends on more than tokens and salt (an adapter, images).
    """

    group: int
    kind: str
    window_tokens: int
    block_tokens: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...] = field(repr=False)
    cache_salt: str = field(repr=False)
    has_other_keys: bool

    @property
    def skips_blocks(self) -> bool:
        """Some of its tokens' blocks were not cached, and it is not said which."""
        return len(self.hashes) * self.block_tokens < len(self.token_ids)


@dataclass(frozen=True, slots=True)
class VllmRemoved:
    """A copy of each of these blocks left the cache."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class VllmCleared:
    """The prefix cache was emptied."""


VllmEvent = VllmStored | VllmRemoved | VllmCleared
Message = tuple[VllmEvent, ...] | ProtocolError
"""What one says, or why it says nothing."""


def read_message(payload: object) -> Message:
    """An unpacked message; runs in any thread, as a large one takes a while."""
    try:
        return read_batch(payload)
    except ProtocolError as error:
        return error


def in_parts(event: VllmEvent, blocks_max: int) -> Iterator[VllmEvent]:
    """The same as events of at most so many blocks, which say it one after the other."""
    if isinstance(event, VllmCleared) or len(event.hashes) <= blocks_max:
        yield event
        return
    for first in range(0, len(event.hashes), blocks_max):
        hashes = event.hashes[first : first + blocks_max]
        if isinstance(event, VllmRemoved) or event.skips_blocks:
            yield replace(event, hashes=hashes)
            continue
        size = event.block_tokens
        token_ids = event.token_ids[first * size : (first + len(hashes)) * size]
        parent = event.hashes[first - 1] if first else event.parent
        yield replace(event, hashes=hashes, token_ids=token_ids, parent=parent)


def read_batch(payload: object) -> tuple[VllmEvent, ...]:
    """Events of one message: the array ``[timestamp, events, data-parallel rank]``.

    Blocks of tiers and of other servers are left out, as are kinds of events not known here.

    Raises:
        ProtocolError: naming the field.
    """
    if not isinstance(payload, Sequence) or len(payload) < 2 or not isinstance(payload[1], list):
        raise ProtocolError("a batch of KV events is no array of time and events")
    events: list[VllmEvent] = []
    for wire in payload[1]:
        if not isinstance(wire, Mapping):
            raise ProtocolError("a KV event is no map; vLLM before 0.32 is not understood")
        kind = wire.get("type")
        if kind == "AllBlocksCleared":
            events.append(VllmCleared())
        elif kind in ("BlockStored", "BlockRemoved") and _is_readable(wire):
            events.append(_stored(wire) if kind == "BlockStored" else _removed(wire))
    return tuple(events)


def _is_readable(wire: Mapping[str, object]) -> bool:
    return wire.get("medium") in READABLE and wire.get("locality") != "REMOTE"


def _stored(wire: Mapping[str, object]) -> VllmStored:
    block_tokens = _number(wire, "block_size")
    token_ids = wire.get("token_ids")
    if not isinstance(token_ids, list) or not _are_token_ids(token_ids):
        raise ProtocolError("token_ids: no list of token ids")
    hashes = _hashes(wire)
    if block_tokens < 1 or len(token_ids) % block_tokens:
        raise ProtocolError(f"token_ids: {len(token_ids)} are no blocks of {block_tokens}")
    if len(hashes) * block_tokens > len(token_ids):
        raise ProtocolError(f"block_hashes: {len(hashes)} for {len(token_ids)} tokens")
    parent = wire.get("parent_block_hash")
    if parent is not None and not _is_hash(parent):
        raise ProtocolError("parent_block_hash: neither a number nor bytes")
    salt, has_other_keys = _extra_keys(wire)
    return VllmStored(
        _group(wire),
        _kind(wire),
        _number(wire, "kv_cache_spec_sliding_window"),
        block_tokens,
        hashes,
        cast("BlockHash | None", parent),
        tuple(token_ids),
        salt,
        has_other_keys or wire.get("lora_name") is not None or wire.get("lora_id") is not None,
    )


def _removed(wire: Mapping[str, object]) -> VllmRemoved:
    return VllmRemoved(_group(wire), _hashes(wire))


def _extra_keys(wire: Mapping[str, object]) -> tuple[str, bool]:
    """The salt of the first block, and whether there is anything else."""
    keys = wire.get("extra_keys")
    if keys is None:
        return "", False
    if not isinstance(keys, list):
        raise ProtocolError("extra_keys: no list")
    match keys:
        case [[str(salt)], *rest] if wire.get("parent_block_hash") is None:
            return salt, any(rest)
    return "", any(keys)


def _kind(wire: Mapping[str, object]) -> str:
    kind = wire.get("kv_cache_spec_kind")
    if kind is not None and not isinstance(kind, str):
        raise ProtocolError("kv_cache_spec_kind: no text")
    return kind or FULL_ATTENTION


def _group(wire: Mapping[str, object]) -> int:
    group = _number(wire, "group_idx")
    if group >= GROUPS_MAX:
        raise ProtocolError(f"group_idx: {group}; at most {GROUPS_MAX} are followed")
    return group


def _hashes(wire: Mapping[str, object]) -> tuple[BlockHash, ...]:
    hashes = wire.get("block_hashes")
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        raise ProtocolError("block_hashes: no list of numbers or bytes")
    return tuple(hashes)


def _number(wire: Mapping[str, object], name: str) -> int:
    """A count that may be absent: 0."""
    value = wire.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or value < 0:
        raise ProtocolError(f"{name}: no count")
    return value


def _is_hash(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, bytes) and len(value) <= HASH_BYTES_MAX)


def _are_token_ids(values: list[object]) -> bool:
    """Not one by one: a message has a million of them."""
    try:
        array("I", cast("list[int]", values))
    except (TypeError, OverflowError):
        return False
    return True
