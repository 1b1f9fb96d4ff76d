"""Which blocks of which group live on which worker, and what a prompt can use of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.kv.kinds.registry import KINDS
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    SnapshotPart,
    TierCleared,
    TierRemoved,
    TierStored,
)
from disagg.messages.registration import GroupInfo
from disagg.routing.boundaries import prepare
from disagg.routing.chain_store import ChainNumbers, ChainStore
from disagg.routing.prefix_hits import PrefixHit as PrefixHit
from disagg.routing.prefix_hits import PrefixHits
from disagg.routing.prompt_walk import PromptWalk
from disagg.routing.worker_bits import WorkerBits

_LOST_BLOCKS = 8_192
"""Blocks of lost workers that are looked at with each change of an index: about two milliseconds,
so long nothing else is done. To take all of a large tier out at once takes a tenth of a second."""
_CHAIN_BLOCKS = 24
"""A chain counts as so many more."""


@dataclass(slots=True)
class _Member:
    bit: int
    keys_max: tuple[int, ...]
    num_keys: list[int]
    """Of the pool, then of each tier; as ``keys_max``."""
    chains: dict[int, ChainNumbers]
    """Chains that may have blocks of it, by block size."""
    next_sequence: int = 0
    num_parts: int = 0
    """Of a snapshot, that have come; 0: none is on its way."""


class PrefixIndex:
    """Block holders of workers that share one layout of KV cache groups.

    Blocks are kept in the chains in which they were stored, with a mask of holders per run of
    blocks, so what a thousand workers share costs little more than once. A prompt is compared a
    stretch at a time with what is kept. Which boundaries a kind of group can use is defined in its
    file in ``disagg.kv.kinds``. The index may be stale: that costs time, never correctness, for
    workers match again by themselves.

    Args:
        groups: the layout; group ``i`` of events is ``groups[i]``.
        hash_block_tokens: tokens per link of the hash chain.
        bits: to name workers by, shared with indexes of other workers; by default its own.

    Raises:
        ConfigError: an unknown kind of group, or sizes that do not divide.
    """

    def __init__(
        self,
        groups: Sequence[GroupInfo],
        hash_block_tokens: int,
        bits: WorkerBits | None = None,
    ) -> None:
        for group in groups:
            check_group(group, hash_block_tokens)
            prepare(group)
        self._groups = tuple(groups)
        self._hash_block_tokens = hash_block_tokens
        self._given_bits = bits if bits is not None else WorkerBits()
        self._num_places = 1
        """The pool, then as many tiers as any worker has had."""
        self._stores = self._new_stores()
        self._members: dict[Incarnation, _Member] = {}
        self._bits: dict[Incarnation, int] = {}
        self._everybody = 0
        self._lost: list[_Member] = []
        """Workers that have gone, of which something is kept: nobody is found by their bits."""

    def __contains__(self, worker: Incarnation) -> bool:
        return worker in self._members

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_blocks(self) -> int:
        """Blocks of which somebody holds something, or has lately, counted once per block size."""
        return sum(map(len, self._stores.values()))

    def add(self, worker: Incarnation, num_blocks: int, tiers: Sequence[int] = ()) -> None:
        """Start with nothing known of ``worker``.

        It can hold at most ``num_blocks`` blocks in its pool, and so many in each of its tiers.
        """
        self._forget_lost()
        keys_max = (num_blocks, *tiers)
        bit = self._bits[worker] = self._given_bits.add(worker)
        self._everybody |= bit
        chains = {block_tokens: ChainNumbers() for block_tokens in self._stores}
        self._members[worker] = _Member(bit, keys_max, [0] * len(keys_max), chains)
        for store in self._stores.values():
            store.add_layers(max(0, len(keys_max) - self._num_places) * len(self._groups))
        self._num_places = max(self._num_places, len(keys_max))

    def remove(self, worker: Incarnation) -> None:
        """Forget ``worker``: it is in no answer any more.

        What is kept of it leaves a part at a time, with the index's next changes.
        """
        member = self._members.pop(worker)
        del self._bits[worker]
        self._everybody ^= member.bit
        self._given_bits.remove(worker)
        self._lost.append(member)
        if self._members:
            self._forget_lost()
            return
        for one in self._lost:
            self._given_bits.give_back(one.bit)
        self._lost.clear()
        self._stores = self._new_stores()

    def num_entries(self, worker: Incarnation) -> int:
        """(group, block) pairs known of ``worker``, in its pool and in its tiers."""
        return sum(self._members[worker].num_keys)

    def next_sequence(self, worker: Incarnation) -> int:
        """Number of the next event wanted."""
        return self._members[worker].next_sequence

    def apply(
        self,
        worker: Incarnation,
        first_sequence: int,
        snapshot: SnapshotPart | None,
        events: Sequence[KVEvent],
    ) -> bool:
        """Take events in; False, and nothing changed, if some before them are missing.

        Events seen already are skipped. ``first_sequence`` numbers ``events[0]``, or the event
        after a snapshot, which is wanted again until its last part has come.
        """
        self._forget_lost()
        member = self._members[worker]
        if snapshot is not None:
            if snapshot.number == 0:
                self._clear(member, range(len(member.keys_max)))
            elif snapshot.number != member.num_parts:
                return False
            member.num_parts = snapshot.number + 1
            if snapshot.is_last:
                member.num_parts, member.next_sequence = 0, first_sequence
        elif first_sequence > member.next_sequence:
            return False
        else:
            events = events[member.next_sequence - first_sequence :]
            member.next_sequence += len(events)
        for event in events:
            self._apply(member, event)
        return True

    def match(self, num_tokens: int, hashes: Sequence[bytes]) -> PrefixHits:
        """What every worker holds of a prompt. Valid until the index changes.

        Args:
            num_tokens: of the prompt. Usable prefixes are at most ``num_tokens - 1`` long, as a
                prefill computes at least one token.
            hashes: chain values of its full hash blocks.
        """
        walks = {}
        for block_tokens, store in self._stores.items():
            stride = block_tokens // self._hash_block_tokens
            values = hashes[stride - 1 :: stride] if stride > 1 else hashes
            walks[block_tokens] = PromptWalk(store, values)
        whole = len(hashes) * self._hash_block_tokens
        return PrefixHits(
            self._groups,
            walks,
            min(num_tokens - 1, whole),
            whole,
            self._num_places,
            self._bits,
            self._everybody,
        )

    def _apply(self, member: _Member, event: KVEvent) -> None:
        match event:
            case BlocksStored():
                self._store(member, 0, event.group, event.hashes, event.parent_hash)
            case BlocksRemoved():
                self._take_out(member, 0, event.group, event.hashes)
            case AllCleared():
                self._clear(member, [0])
            case TierStored():
                self._store(member, event.tier + 1, event.group, event.hashes, None)
            case TierRemoved():
                self._take_out(member, event.tier + 1, event.group, event.hashes)
            case TierCleared():
                self._clear(member, [event.tier + 1])

    def _store(
        self,
        member: _Member,
        place: int,
        group: int,
        hashes: Sequence[bytes],
        parent_hash: bytes | None,
    ) -> None:
        if not self._is_known(member, place, group):
            return
        block_tokens = self._groups[group].block_tokens
        member.num_keys[place] += self._stores[block_tokens].hold(
            self._layer(place, group),
            member.bit,
            hashes,
            parent_hash,
            member.keys_max[place] - member.num_keys[place],
            member.chains[block_tokens],
        )

    def _take_out(self, member: _Member, place: int, group: int, hashes: Sequence[bytes]) -> None:
        if self._is_known(member, place, group):
            store = self._stores[self._groups[group].block_tokens]
            layer = self._layer(place, group)
            member.num_keys[place] -= store.drop(layer, member.bit, hashes)

    def _is_known(self, member: _Member, place: int, group: int) -> bool:
        return 0 <= group < len(self._groups) and 0 <= place < len(member.keys_max)

    def _layer(self, place: int, group: int) -> int:
        return place * len(self._groups) + group

    def _new_stores(self) -> dict[int, ChainStore]:
        num_layers = self._num_places * len(self._groups)
        return {group.block_tokens: ChainStore(num_layers) for group in self._groups}

    def _forget_lost(self) -> None:
        """Take out a part of what is kept of workers that have gone."""
        room = _LOST_BLOCKS
        while self._lost and room > 0:
            member = self._lost[-1]
            left = next((item for item in member.chains.items() if item[1]), None)
            if left is None:
                self._lost.pop()
                self._given_bits.give_back(member.bit)
                continue
            block_tokens, numbers = left
            layers = self._layers(range(len(member.keys_max)))
            num_blocks = self._stores[block_tokens].drop_chain(numbers.pop(), layers, member.bit)
            room -= _CHAIN_BLOCKS + num_blocks

    def _layers(self, places: Iterable[int]) -> list[int]:
        return [self._layer(place, g) for place in places for g in range(len(self._groups))]

    def _clear(self, member: _Member, places: Sequence[int]) -> None:
        known = [place for place in places if place < len(member.keys_max)]
        layers = self._layers(known)
        for block_tokens, store in self._stores.items():
            store.drop_all(layers, member.bit, member.chains[block_tokens])
        for place in known:
            member.num_keys[place] = 0


def check_group(group: GroupInfo, hash_block_tokens: int) -> None:
    """Refuse a group that could not be matched exactly.

    Raises:
        ConfigError: naming the field.
    """
    if group.kind not in KINDS:
        raise ConfigError(
            f"unknown kind of KV cache group {group.kind!r}; known: {', '.join(sorted(KINDS))}",
            param="groups.kind",
        )
    if hash_block_tokens < 1:
        raise ConfigError("hash_block_tokens must be positive", param="hash_block_tokens")
    if group.block_tokens < 1 or group.block_tokens % hash_block_tokens:
        raise ConfigError(
            f"block of {group.block_tokens} tokens is no multiple of the hash block "
            f"of {hash_block_tokens}",
            param="groups.block_tokens",
        )
    KINDS[group.kind].check_group(group)
