"""Which blocks of which group live on which worker, and what a prompt can use of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import lcm

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import EVERYBODY
from disagg.kv.kinds.registry import KINDS
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    TierRemoved,
    TierStored,
)
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What one worker has of a prompt, in its pool and in its tiers."""

    usable_tokens: int
    """All groups agree."""
    group_tokens: tuple[int, ...]
    """Each group on its own, at its own block size."""
    reach_tokens: int = 0
    """All groups agree once it has loaded what its tiers have; 0: tiers have no more of it."""
    loads: tuple[tuple[int, int], ...] = ()
    """For that: tier and blocks, of each tier that it has to read."""


@dataclass(slots=True)
class _Member:
    bit: int
    keys_max: tuple[int, ...]
    keys: list[set[tuple[int, bytes]]]
    """Of the pool, then of each tier; as ``keys_max``."""
    next_sequence: int = 0


class PrefixIndex:
    """Block holders of workers that share one layout of KV cache groups.

    Workers are bits of an int, so one pass answers for the whole fleet; which boundaries a kind of
    group can use is defined in its file in ``disagg.kv.kinds``. The index may be stale: that costs
    time, never correctness, for workers match again by themselves.

    Args:
        groups: the layout; group ``i`` of events is ``groups[i]``.
        hash_block_tokens: tokens per link of the hash chain.

    Raises:
        ConfigError: an unknown kind of group, or sizes that do not divide.
    """

    def __init__(self, groups: Sequence[GroupInfo], hash_block_tokens: int) -> None:
        for group in groups:
            check_group(group, hash_block_tokens)
        self._groups = tuple(groups)
        self._hash_block_tokens = hash_block_tokens
        self._step_tokens = lcm(*(group.block_tokens for group in groups))
        self._places: list[tuple[dict[bytes, int], ...]] = [tuple({} for _ in groups)]
        """Holders by place: in the pool, in the worker's first tier, in its second, ..."""
        self._members: dict[Incarnation, _Member] = {}
        self._slots: list[Incarnation | None] = []

    def __contains__(self, worker: Incarnation) -> bool:
        return worker in self._members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, worker: Incarnation, num_blocks: int, tiers: Sequence[int] = ()) -> None:
        """Start with nothing known of ``worker``.

        It can hold at most ``num_blocks`` blocks in its pool, and so many in each of its tiers.
        """
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = worker
        else:
            slot = len(self._slots)
            self._slots.append(worker)
        keys_max = (num_blocks, *tiers)
        self._members[worker] = _Member(1 << slot, keys_max, [set() for _ in keys_max])
        while len(self._places) < len(keys_max):
            self._places.append(tuple({} for _ in self._groups))

    def remove(self, worker: Incarnation) -> None:
        """Forget ``worker`` and its blocks."""
        member = self._members.pop(worker)
        self._clear_all(member)
        self._slots[member.bit.bit_length() - 1] = None

    def num_entries(self, worker: Incarnation) -> int:
        """(group, block) pairs known of ``worker``, in its pool and in its tiers."""
        return sum(map(len, self._members[worker].keys))

    def next_sequence(self, worker: Incarnation) -> int:
        """Number of the next event wanted."""
        return self._members[worker].next_sequence

    def apply(
        self, worker: Incarnation, first_sequence: int, snapshot: bool, events: Sequence[KVEvent]
    ) -> bool:
        """Take events in; False, and nothing changed, if some before them are missing.

        Events seen already are skipped. ``first_sequence`` numbers ``events[0]``, or the next
        event when it is a snapshot.
        """
        member = self._members[worker]
        if snapshot:
            self._clear_all(member)
            member.next_sequence = first_sequence
        elif first_sequence > member.next_sequence:
            return False
        else:
            events = events[member.next_sequence - first_sequence :]
            member.next_sequence += len(events)
        for event in events:
            self._apply(member, event)
        return True

    def match(self, num_tokens: int, hashes: Sequence[bytes]) -> dict[Incarnation, PrefixHit]:
        """What every worker holds of a prompt, for all workers at once.

        Args:
            num_tokens: of the prompt. Usable prefixes are at most ``num_tokens - 1`` long, as a
                prefill computes at least one token.
            hashes: chain values of its full hash blocks.
        """
        in_pool = self._masks(hashes, self._places[:1])
        usable, total = self._agreed(num_tokens, hashes, in_pool)
        alone = [
            self._last(ends, group.block_tokens)
            for group, ends in zip(self._groups, usable, strict=True)
        ]
        reached: dict[int, int] = {}
        if len(self._places) > 1:
            _, reached = self._agreed(num_tokens, hashes, self._masks(hashes, self._places))
        hits = {}
        for worker, member in self._members.items():
            tokens, reach = total.get(member.bit, 0), reached.get(member.bit, 0)
            groups = tuple(ends.get(member.bit, 0) for ends in alone)
            loads = self._loads(member, reach, hashes) if reach > tokens else ()
            hits[worker] = PrefixHit(tokens, groups, reach if loads else 0, loads)
        return hits

    def _masks(
        self, hashes: Sequence[bytes], places: Sequence[tuple[dict[bytes, int], ...]]
    ) -> list[list[int]]:
        """Per group and block, who has it at any of the places."""
        masks = []
        for number, group in enumerate(self._groups):
            values = hashes[self._stride(group) - 1 :: self._stride(group)]
            pool, tiers = places[0][number], [place[number] for place in places[1:]]
            mine = [pool.get(value, 0) for value in values]
            for holders in tiers:
                found = map(holders.get, values, repeat(0))
                mine = [mask | more for mask, more in zip(mine, found, strict=False)]
            masks.append(mine)
        return masks

    def _agreed(
        self, num_tokens: int, hashes: Sequence[bytes], masks: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], dict[int, int]]:
        """Who can go on where, per group; and per worker's bit the last boundary of all groups."""
        per_group = [
            KINDS[group.kind].usable_at(group, mine)
            for group, mine in zip(self._groups, masks, strict=True)
        ]
        longest = min(num_tokens - 1, len(hashes) * self._hash_block_tokens)
        agreed = []
        for end in range(self._step_tokens, longest + 1, self._step_tokens):
            mask = EVERYBODY
            for group, usable in zip(self._groups, per_group, strict=True):
                mask &= usable[end // group.block_tokens - 1]
            agreed.append(mask)
        return per_group, self._last(agreed, self._step_tokens)

    def _loads(
        self, member: _Member, num_tokens: int, hashes: Sequence[bytes]
    ) -> tuple[tuple[int, int], ...]:
        """What a worker reads for a boundary: each block from the first tier that has it."""
        blocks: Counter[int] = Counter()
        for number, group in enumerate(self._groups):
            num_blocks, stride = num_tokens // group.block_tokens, self._stride(group)
            first = KINDS[group.kind].first_needed(group, num_blocks)
            for value in hashes[(first + 1) * stride - 1 : num_blocks * stride : stride]:
                for place, keys in enumerate(member.keys):
                    if (number, value) in keys:
                        blocks[place] += 1
                        break
        del blocks[0]
        return tuple((place - 1, blocks[place]) for place in sorted(blocks))

    def _stride(self, group: GroupInfo) -> int:
        return group.block_tokens // self._hash_block_tokens

    def _last(self, usable: Sequence[int], block_tokens: int) -> dict[int, int]:
        """Per worker's bit the last boundary, in tokens, at which the bit is set."""
        ends: dict[int, int] = {}
        missing = sum(member.bit for member in self._members.values())
        for i in range(len(usable) - 1, -1, -1):
            if not missing:
                break
            for bit in _bits(usable[i] & missing):
                ends[bit] = (i + 1) * block_tokens
                missing &= ~bit
        return ends

    def _apply(self, member: _Member, event: KVEvent) -> None:
        match event:
            case BlocksStored():
                self._store(member, 0, event.group, event.hashes)
            case BlocksRemoved():
                self._take_out(member, 0, event.group, event.hashes)
            case AllCleared():
                self._clear(member, 0)
            case TierStored():
                self._store(member, event.tier + 1, event.group, event.hashes)
            case TierRemoved():
                self._take_out(member, event.tier + 1, event.group, event.hashes)
            case TierCleared():
                self._clear(member, event.tier + 1)

    def _store(self, member: _Member, place: int, group: int, hashes: Sequence[bytes]) -> None:
        if not self._is_known(member, place, group):
            return
        keys, holders = member.keys[place], self._places[place][group]
        for value in hashes:
            if (group, value) in keys or len(keys) < member.keys_max[place]:
                keys.add((group, value))
                holders[value] = holders.get(value, 0) | member.bit

    def _take_out(self, member: _Member, place: int, group: int, hashes: Sequence[bytes]) -> None:
        if not self._is_known(member, place, group):
            return
        keys, holders = member.keys[place], self._places[place][group]
        for value in hashes:
            if (group, value) in keys:
                keys.remove((group, value))
                self._drop(holders, value, member.bit)

    def _is_known(self, member: _Member, place: int, group: int) -> bool:
        return 0 <= group < len(self._groups) and 0 <= place < len(member.keys)

    def _clear_all(self, member: _Member) -> None:
        for place in range(len(member.keys)):
            self._clear(member, place)

    def _clear(self, member: _Member, place: int) -> None:
        if place < len(member.keys):
            for group, value in member.keys[place]:
                self._drop(self._places[place][group], value, member.bit)
            member.keys[place].clear()

    @staticmethod
    def _drop(holders: dict[bytes, int], value: bytes, bit: int) -> None:
        rest = holders[value] & ~bit
        if rest:
            holders[value] = rest
        else:
            del holders[value]


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


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
