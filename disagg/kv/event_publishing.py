"""KV events in the shape that vLLM's subscribers read; packing and sockets are a shell's.

The field names, their order and which are left out were read from vLLM 0.33.0's
``distributed/kv_events.py``: a batch is the array ``[timestamp, events, data-parallel rank]``, an
event is a map that begins with ``type``, and fields at their default are absent.
"""

from collections.abc import Sequence
from typing import assert_never

from disagg.errors import ConfigError
from disagg.kv.shapes.layout import KVCacheGroup
from disagg.messages.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    TierRemoved,
    TierStored,
)

MEDIUM = "GPU"
"""vLLM's name for blocks that a forward pass can read, on whatever device."""
_LOW_64_BITS = (1 << 64) - 1

WireEvent = dict[str, object]


class VllmEventShape:
    """Turns a coordinator's events into vLLM's.

    Args:
        groups: the layout's groups; stored events carry kind and window of theirs.
        data_parallel_rank: number of this worker among those that publish.
        int_hashes: chain values as their low 64 bits (vLLM's default), else all bytes.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        *,
        data_parallel_rank: int = 0,
        int_hashes: bool = True,
    ) -> None:
        self._groups = tuple(groups)
        self._rank = data_parallel_rank
        self._int_hashes = int_hashes

    def batch(self, timestamp_s: float, events: Sequence[KVEvent]) -> list[object]:
        """One message's payload, ready to be packed as msgpack with its keys in this order.

        Raises:
            ConfigError: stored events without token ids; subscribers hash the tokens.
        """
        return [timestamp_s, [self._event(event) for event in events], self._rank]

    def _event(self, event: KVEvent) -> WireEvent:
        match event:
            case BlocksStored():
                return self._stored(event)
            case BlocksRemoved():
                return {
                    "type": "BlockRemoved",
                    "block_hashes": [self._hash(value) for value in event.hashes],
                    "medium": MEDIUM,
                    "group_idx": event.group,
                }
            case AllCleared():
                return {"type": "AllBlocksCleared"}
            case TierStored() | TierRemoved() | TierCleared():
                raise ConfigError("vLLM's events know no tiers", param="events")
        assert_never(event)

    def _stored(self, event: BlocksStored) -> WireEvent:
        if len(event.token_ids) != len(event.hashes) * event.block_tokens:
            raise ConfigError(
                f"a stored event of group {event.group} carries {len(event.token_ids)} of "
                f"{len(event.hashes) * event.block_tokens} token ids",
                param="events_with_tokens",
            )
        spec = self._groups[event.group].spec
        wire: WireEvent = {
            "type": "BlockStored",
            "block_hashes": [self._hash(value) for value in event.hashes],
            "parent_block_hash": (
                None if event.parent_hash is None else self._hash(event.parent_hash)
            ),
            "token_ids": list(event.token_ids),
            "block_size": event.block_tokens,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            "extra_keys": [None] * len(event.hashes),
            "group_idx": event.group,
            "kv_cache_spec_kind": spec.vllm_kind,
        }
        return wire | spec.event_fields()

    def _hash(self, value: bytes) -> int | bytes:
        return int.from_bytes(value, "big") & _LOW_64_BITS if self._int_hashes else value
