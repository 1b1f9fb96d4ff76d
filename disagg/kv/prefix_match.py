"""The longest prefix that all groups agree on."""

from collections.abc import Sequence
from math import lcm

from disagg.kv.blocks.hits import CacheHit
from disagg.kv.kinds.manager import GroupManager


class PrefixMatcher:
    """Fixed point over the groups, as in vLLM v1's hybrid coordinator.

    Groups with equal specs are looked up jointly. Kinds that need only what is in their window
    go first: they find a bound with few look-ups, and match again until the length is stable.
    Kinds whose hits are downward-closed are looked up once and then trimmed. The longest common
    prefix does not depend on the order; with EAGLE groups, where a step proves more than it
    returns, it does, and downward-closed kinds go first as in the peer.

    Args:
        managers: one per group.
        alignment_tokens: hits are multiples of it.
        eagle_groups: groups whose hits must be proven one block further.
    """

    def __init__(
        self,
        managers: Sequence[GroupManager],
        alignment_tokens: int,
        eagle_groups: frozenset[int],
    ) -> None:
        self._num_groups = len(managers)
        self.alignment_tokens = alignment_tokens
        self.nesting = tuple(manager for manager in managers if manager.hits_nest)
        """Whose hits are looked up once and then trimmed."""
        self.others = tuple(manager for manager in managers if not manager.hits_nest)
        joint: dict[tuple[object, bool], list[GroupManager]] = {}
        for manager in managers:
            joint.setdefault((manager.spec, manager.group in eagle_groups), []).append(manager)
        self._kinds = sorted(
            ((members, eagle) for (_, eagle), members in joint.items()),
            key=lambda kind: kind[0][0].hits_nest != bool(eagle_groups),
        )

    def find(self, hashes: Sequence[bytes], max_tokens: int) -> CacheHit:
        """Longest prefix of at most ``max_tokens`` tokens cached in every group."""
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        length = max_tokens
        proven: set[int] = set()
        asked: set[int] = set()
        while True:
            start = length
            for number, (members, eagle) in enumerate(self._kinds):
                lead = members[0]
                if number in asked and lead.hits_nest:
                    length -= length % lead.block_tokens
                    continue
                drop_last = eagle and number not in proven
                # The proof may lie beyond max_tokens; one kind alone is matched as the peer does.
                further = lead.proof_tokens if drop_last and len(self._kinds) > 1 else 0
                runs = self._match(
                    members, hashes, length + further, self.alignment_tokens, drop_last
                )
                asked.add(number)
                reached = lead.spanned_tokens(len(runs[0]))
                if drop_last:
                    proven.add(number)
                elif reached < length:
                    proven.clear()
                length = min(length, reached)
                for member, run in zip(members, runs, strict=True):
                    found[member.group] = run
            if length >= start or len(self._kinds) == 1:
                break
        self._trim(found, length)
        return CacheHit(length, tuple(found))

    def find_always_visible(self, hashes: Sequence[bytes], max_tokens: int) -> CacheHit:
        """Longest prefix cached in all full-attention groups, whatever the others hold."""
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        kinds = [members for members, _ in self._kinds if members[0].hits_nest]
        length = max_tokens if kinds else 0
        alignment = lcm(*(members[0].block_tokens for members in kinds))
        for members in kinds:
            runs = self._match(members, hashes, length, alignment, False)
            length = members[0].spanned_tokens(len(runs[0]))
            for member, run in zip(members, runs, strict=True):
                found[member.group] = run
        self._trim(found, length)
        return CacheHit(length, tuple(found))

    def group_tokens(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[int, ...]:
        """Per kind on its own: how long a prefix its groups still hold."""
        tokens = [0] * self._num_groups
        for members, eagle in self._kinds:
            size = members[0].block_tokens
            runs = self._match(members, hashes, max_tokens, size, eagle)
            for member in members:
                tokens[member.group] = member.spanned_tokens(len(runs[0]))
        return tuple(tokens)

    def _match(
        self,
        members: list[GroupManager],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        lead = members[0]
        groups = [member.group for member in members]
        return lead.match(groups, lead.chain(hashes), max_tokens, alignment_tokens, drop_last)

    def _trim(self, found: list[list[int]], num_tokens: int) -> None:
        for members, _ in self._kinds:
            for member in members:
                del found[member.group][member.num_full_blocks(num_tokens) :]
