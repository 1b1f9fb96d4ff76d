"""Our names for blocks that a server calls by hashes of its own."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from disagg.errors import ConfigError, ProtocolError
from disagg.kv.kinds.registry import KINDS
from disagg.messages.kv_events import AllCleared, BlocksRemoved, BlocksStored, KVEvent
from disagg.messages.registration import GroupInfo
from disagg.routing.followed.vllm_events import (
    BlockHash,
    VllmCleared,
    VllmEvent,
    VllmRemoved,
    VllmStored,
    in_parts,
)
from disagg.routing.index import check_group
from disagg.routing.revisions import HashExtend

Layout = tuple[GroupInfo, ...]
OUR_KINDS = {kind.vllm_kind: name for name, kind in KINDS.items()}
SaltOf = Callable[[str], bytes]
"""Salt of the chains of requests with this cache salt."""
PART_BLOCKS = 512
"""Of an event that are taken in at once: a millisecond or two."""


def num_blocks_of(event: VllmEvent) -> int:
    """That an event names."""
    return 0 if isinstance(event, VllmCleared) else len(event.hashes)


@dataclass(slots=True)
class _Block:
    name: bytes
    """Chain value at its end."""
    groups: int = 0
    """Bits of those that have it."""


class BlockNames:
    """What one server's cache holds, under the names that this router gives to blocks.

    A name is computed from a block's tokens and the name of the block before it, so a block whose
    predecessors were never told of has none, nor has one whose KV depends on more than tokens and
    salt. Such blocks are left out, which costs hits and invents none. Copies are counted, as
    vLLM tells of each that comes and of each that leaves.

    Args:
        extend: names blocks of ``name_tokens`` tokens.
        name_tokens: must divide the sizes of all blocks.
        salt_of: the salt with which chains begin.
        blocks_max: blocks of a server that are kept in mind; more are left out. So many that
            it has no more are remembered besides, as others may come after them.

    Attributes:
        blocks_max: as given.
        num_unnamed: blocks that were left out.
    """

    def __init__(
        self, extend: HashExtend, name_tokens: int, salt_of: SaltOf, blocks_max: int
    ) -> None:
        self.blocks_max = blocks_max
        self.num_unnamed = 0
        self._groups: dict[int, GroupInfo] = {}
        self._extend = extend
        self._name_tokens = name_tokens
        self._salt_of = salt_of
        self._held: dict[BlockHash, _Block] = {}
        self._more: Counter[tuple[BlockHash, int]] = Counter()
        """Copies after the first, by block and group."""
        # Not a dict: finding the first key of one steps over all that were deleted before it.
        self._past: OrderedDict[BlockHash, bytes] = OrderedDict()
        self._new: dict[BlockHash, bytes] = {}
        """Named by the events that are being taken in."""

    def __len__(self) -> int:
        """Blocks that the server has in some group."""
        return len(self._held)

    @property
    def layout(self) -> Layout:
        """The groups in order; () until something was stored in each up to the last one."""
        if any(number not in self._groups for number in range(len(self._groups))):
            return ()
        return tuple(self._groups[number] for number in range(len(self._groups)))

    def clear(self) -> None:
        """Forget everything, names and groups too."""
        self._groups.clear()
        self._held.clear()
        self._more.clear()
        self._past.clear()
        self._new.clear()

    def held(self) -> list[KVEvent]:
        """What would have led to all that the server has now."""
        return [
            BlocksStored(group, names, None, 0, info.block_tokens)
            for group, info in self._groups.items()
            if (names := tuple(b.name for b in self._held.values() if b.groups >> group & 1))
        ]

    def take_in(self, events: Sequence[VllmEvent]) -> Iterator[tuple[int, list[KVEvent]]]:
        """The same events under our names, in parts; changes `layout` where a group is new.

        Returns:
            Parts of the work, to be done one after the other: of how many blocks one was, and the
            events that came of it. Nothing else may be taken in between, but all be cleared.

        Raises:
            ProtocolError: a block's size cannot be named.
            ConfigError: a kind of group that cannot be matched.
        """
        grown = {one.group for one in events if isinstance(one, VllmStored) and self._learn(one)}
        if grown:
            self._forget(grown)
        yield 0, []  # a new layout has its index before anything is told
        # A group that skips blocks does not say which, but another tells of all of them.
        for event in events:
            for part in in_parts(event, PART_BLOCKS):
                if isinstance(part, VllmStored):
                    yield self._name(part), []
        for event in events:
            for part in in_parts(event, PART_BLOCKS):
                yield num_blocks_of(part), list(self._told(part))
        self._new.clear()

    def _learn(self, event: VllmStored) -> bool:
        """Know the group of an event; whether its blocks are larger than was known.

        Of two block sizes the larger is that of whole blocks.
        """
        if event.block_tokens % self._name_tokens:
            raise ProtocolError(
                f"blocks of {event.block_tokens} tokens are no multiple of "
                f"{self._name_tokens} (router.kv_event_block_tokens)"
            )
        if event.kind not in OUR_KINDS:
            raise ConfigError(f"groups of the kind {event.kind[:64]!r} cannot be followed")
        info = GroupInfo(OUR_KINDS[event.kind], event.block_tokens, event.window_tokens, 1, 0)
        known = self._groups.get(event.group)
        if known is not None:
            if replace(known, block_tokens=info.block_tokens) != info:
                raise ProtocolError(f"group {event.group} has changed its kind or its window")
            if info.block_tokens <= known.block_tokens:
                return False
        check_group(info, self._name_tokens)
        self._groups[event.group] = info
        return known is not None

    def _forget(self, groups: set[int]) -> None:
        """Forget what these groups hold."""
        bits = sum(1 << group for group in groups)
        for value in [one for one, block in self._held.items() if block.groups & bits]:
            for group in groups:
                self._more.pop((value, group), None)
                self._drop(value, group)

    def _name(self, event: VllmStored) -> int:
        """Name the blocks of an event that tells of every one; how many it looked at."""
        stride = event.block_tokens // self._name_tokens
        if event.has_other_keys or event.skips_blocks:
            return 0
        num = len(event.hashes)
        if all(map(self._name_of, event.hashes)):
            return num
        chain: list[bytes] = []
        tokens: Sequence[int] = event.token_ids
        salt = b""
        if event.parent is None:
            salt = self._salt_of(event.cache_salt)
        elif (parent := self._name_of(event.parent)) is not None:
            chain, tokens = [parent], [0] * self._name_tokens + list(tokens)
        else:
            return num
        first = len(chain)
        self._extend(chain, tokens, salt)
        for value, name in zip(event.hashes, chain[first + stride - 1 :: stride], strict=True):
            self._new[value] = name
        return num

    def _told(self, event: VllmEvent) -> Iterator[KVEvent]:
        match event:
            case VllmStored():
                yield from self._stored(event)
            case VllmRemoved(group, hashes):
                names = [name for value in hashes if (name := self._drop(value, group))]
                if names:
                    yield BlocksRemoved(group, tuple(names))
            case VllmCleared():
                self._held.clear()
                self._more.clear()
                yield AllCleared()

    def _stored(self, event: VllmStored) -> Iterator[KVEvent]:
        if event.block_tokens < self._groups[event.group].block_tokens:
            return  # a boundary inside a block, which nothing here asks for
        names = []
        for value in event.hashes:
            name = self._hold(value, event.group)
            if name is None:
                self.num_unnamed += 1
            else:
                names.append(name)
        if names:
            parent = None if event.parent is None else self._name_of(event.parent)
            is_whole = len(names) * event.block_tokens == len(event.token_ids)
            yield BlocksStored(
                event.group, tuple(names), parent if is_whole else None, 0, event.block_tokens
            )

    def _hold(self, value: BlockHash, group: int) -> bytes | None:
        block = self._held.get(value)
        if block is None:
            name = self._name_of(value)
            if name is None or len(self._held) >= self.blocks_max:
                return None
            self._past.pop(value, None)
            block = self._held[value] = _Block(name)
        if block.groups >> group & 1:
            self._more[value, group] += 1
        block.groups |= 1 << group
        return block.name

    def _drop(self, value: BlockHash, group: int) -> bytes | None:
        """Take a copy from a group; the block's name if it was the last one."""
        block = self._held.get(value)
        if block is None or not block.groups >> group & 1:
            return None
        if num_more := self._more.pop((value, group), 0):
            if num_more > 1:
                self._more[value, group] = num_more - 1
            return None
        block.groups ^= 1 << group
        if not block.groups:
            del self._held[value]
            self._remember(value, block.name)
        return block.name

    def _remember(self, value: BlockHash, name: bytes) -> None:
        self._past[value] = name
        if len(self._past) > self.blocks_max:
            self._past.popitem(last=False)

    def _name_of(self, value: BlockHash) -> bytes | None:
        block = self._held.get(value)
        if block is not None:
            return block.name
        return self._new.get(value) or self._past.get(value)
