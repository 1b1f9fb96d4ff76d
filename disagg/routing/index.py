"""Which blocks of which group live on which worker, and what a prompt can use of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import EVERYBODY
from disagg.kv.kinds.registry import KINDS
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import AllCleared, BlocksRemoved, BlocksStored, KVEvent
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What one worker holds of a prompt, in tokens."""

    usable_tokens: int
    """All groups agree."""
    group_tokens: tuple[int, ...]
    """Each group on its own, at its own block size."""


@dataclass(slots=True)
class _Member:
    bit: int
    keys_max: int
    keys: set[tuple[int, bytes]]
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
        self._holders: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
        self._members: dict[Incarnation, _Member] = {}
        self._slots: list[Incarnation | None] = []

    def __contains__(self, worker: Incarnation) -> bool:
        return worker in self._members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, worker: Incarnation, num_blocks: int) -> None:
        """Start with nothing known of ``worker``; it can hold at most ``num_blocks`` blocks."""
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = worker
        else:
            slot = len(self._slots)
            self._slots.append(worker)
        self._members[worker] = _Member(1 << slot, num_blocks, set())

    def remove(self, worker: Incarnation) -> None:
        """Forget ``worker`` and its blocks."""
        member = self._members.pop(worker)
        self._clear(member)
        self._slots[member.bit.bit_length() - 1] = None

    def num_entries(self, worker: Incarnation) -> int:
        """(group, block) pairs known of ``worker``."""
        return len(self._members[worker].keys)

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
            self._clear(member)
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
        per_group = []
        for group, holders in zip(self._groups, self._holders, strict=True):
            stride = group.block_tokens // self._hash_block_tokens
            masks = [holders.get(value, 0) for value in hashes[stride - 1 :: stride]]
            per_group.append(KINDS[group.kind].usable_at(group, masks))
        longest = min(num_tokens - 1, len(hashes) * self._hash_block_tokens)
        agreed = []
        for end in range(self._step_tokens, longest + 1, self._step_tokens):
            mask = EVERYBODY
            for group, usable in zip(self._groups, per_group, strict=True):
                mask &= usable[end // group.block_tokens - 1]
            agreed.append(mask)
        total = self._last(agreed, self._step_tokens)
        alone = [
            self._last(usable, group.block_tokens)
            for group, usable in zip(self._groups, per_group, strict=True)
        ]
        return {
            worker: PrefixHit(
                total.get(member.bit, 0), tuple(ends.get(member.bit, 0) for ends in alone)
            )
            for worker, member in self._members.items()
        }

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
        if isinstance(event, AllCleared):
            self._clear(member)
            return
        if not 0 <= event.group < len(self._groups):
            return
        holders = self._holders[event.group]
        if isinstance(event, BlocksStored):
            for value in event.hashes:
                key = (event.group, value)
                if key in member.keys or len(member.keys) < member.keys_max:
                    member.keys.add(key)
                    holders[value] = holders.get(value, 0) | member.bit
        elif isinstance(event, BlocksRemoved):
            for value in event.hashes:
                if (event.group, value) in member.keys:
                    member.keys.remove((event.group, value))
                    self._drop(holders, value, member.bit)

    def _clear(self, member: _Member) -> None:
        for group, value in member.keys:
            self._drop(self._holders[group], value, member.bit)
        member.keys.clear()

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
