"""Chains of blocks of one size: found by value, held by workers, walked along a prompt."""

from collections.abc import Sequence

from disagg.routing.chain import BLOCKS_MAX, OFFSET_BITS, VALUE_BYTES, Chain
from disagg.routing.positions import AT_ONCE_MAX, CHAINS_MAX, PositionTable

_OFFSETS = BLOCKS_MAX - 1
DEAD_BLOCKS_MAX = 8
"""So many blocks inside a chain, and an eighth of it, may be there that nobody holds any more."""

_PIECE_BLOCKS_MAX = 8
"""So few new blocks that do not go on at the end of a chain do not make one of their own: chains
are as many as there are prompts with ends of their own, and cost hundreds of bytes each."""


class ChainNumbers(set[int]):
    """Chains that may have blocks of one worker; some of them may have had.

    Attributes:
        look_at: at so many it is worth to look which of them still have.
    """

    look_at = 64


class ChainStore:
    """Blocks of one size, whatever their group: groups store the same values again.

    Args:
        num_layers: places times groups, so far; see `Chain`.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.chains: list[Chain | None] = [None]
        """By number; none has number 0, so no entry of the table is 0."""
        self._free: list[int] = []
        self._table = PositionTable(self.chains)
        self._piles: dict[int, tuple[int, Chain]] = {}
        """Number and chain for the pieces of each worker, by its bit: however the events of workers
        alternate, those of one lie side by side and are one run of holders."""

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return sum(len(chain) - chain.num_dead for chain in self.chains if chain is not None)

    def add_layers(self, num_layers: int) -> None:
        """There are so many layers more."""
        self._num_layers += num_layers
        for chain in self.chains:
            if chain is not None:
                chain.layers += [None] * num_layers

    def hold(
        self,
        layer: int,
        bit: int,
        values: Sequence[bytes],
        parent: bytes | None,
        num_max: int,
        numbers: ChainNumbers,
    ) -> int:
        """Somebody has these blocks now; returns how many of them were new there.

        Once there are all the chains that positions have numbers for, no others are kept.

        Args:
            layer: where they have them.
            bit: who.
            values: of the blocks, in any order; others than sha256 values are left out.
            parent: value before the first block; None where nothing is before it, or it is unknown.
            num_max: no more new ones than this: the first ones.
            numbers: takes in the numbers of the chains on which they are.
        """
        if set(map(len, values)) != {VALUE_BYTES}:
            values = [value for value in values if len(value) == VALUE_BYTES]
        num_new, i = 0, 0
        before = self._table.find(parent) if parent is not None else -1
        while i < len(values) and num_new < num_max:
            room = num_max - num_new
            position = self._table.find(values[i])
            if position < 0:
                position, num = self._append(before, values[i : i + min(room, AT_ONCE_MAX)], bit)
                if not num:
                    break
                chain = self._chain(position)
            else:
                chain = self._chain(position)
                num = min(chain.num_equal(position & _OFFSETS, values, i), room)
            offset = position & _OFFSETS
            numbers.add(position >> OFFSET_BITS)
            num_new += chain.hold(layer, offset, offset + num, bit)
            before = position + num - 1
            i += num
        if len(numbers) >= numbers.look_at:
            self._prune(numbers, bit)
        return num_new

    def drop(self, layer: int, bit: int, values: Sequence[bytes]) -> int:
        """Somebody has these blocks no more; returns how many of them were there."""
        num_gone, i = 0, 0
        while i < len(values):
            position = self._table.find(values[i])
            if position < 0:
                i += 1
                continue
            chain, begin = self._chain(position), position & _OFFSETS
            num = chain.num_equal(begin, values, i)
            if num == 1:  # the last ones may come first
                num = chain.num_equal_back(begin, values, i)
                begin -= num - 1
            num_gone += chain.drop(layer, begin, begin + num, bit)
            self._tidy(position >> OFFSET_BITS, chain)
            i += num
        return num_gone

    def drop_all(self, layers: Sequence[int], bit: int, numbers: ChainNumbers) -> None:
        """Somebody has nothing any more in these layers of these chains."""
        for number in numbers:
            self.drop_chain(number, layers, bit)
        self._prune(numbers, bit)

    def drop_chain(self, number: int, layers: Sequence[int], bit: int) -> int:
        """The same of one chain; returns the blocks that were looked at."""
        chain = self.chains[number]
        if chain is None:
            return 0
        num = len(chain)
        for layer in layers:
            chain.drop(layer, 0, num, bit)
        self._tidy(number, chain)
        return num

    def find(self, value: bytes) -> tuple[Chain, int] | None:
        """Chain and offset of a prompt's value."""
        position = self._table.find_again(value)
        return (self._chain(position), position & _OFFSETS) if position >= 0 else None

    def next_known(self, values: Sequence[bytes], start: int, end: int) -> int:
        """Index of the first value in a range that is kept here; ``end``: none."""
        return self._table.next_known(values, start, end)

    def _prune(self, numbers: ChainNumbers, bit: int) -> None:
        """Leave only chains on which somebody has something."""
        for number in list(numbers):
            chain = self.chains[number]
            if chain is None or not chain.has(bit):
                numbers.remove(number)
        numbers.look_at = 64 + 2 * len(numbers)

    def _chain(self, position: int) -> Chain:
        chain = self.chains[position >> OFFSET_BITS]
        assert chain is not None
        return chain

    def _append(self, before: int, values: Sequence[bytes], bit: int) -> tuple[int, int]:
        """Put new blocks behind the one before them if it is the last of its chain.

        Args:
            before: its position; -1: it is unknown.
            values: of the new blocks; perhaps of known ones after some of them, or the same again.
            bit: who stores them.

        Returns:
            The first one's position and their number; no number: there are too many chains.
        """
        if before >= 0 and self._is_open(before >> OFFSET_BITS, before & _OFFSETS):
            number = before >> OFFSET_BITS
        elif len(values) < _PIECE_BLOCKS_MAX:
            number = self._pile_number(bit)
        else:
            number = self._new_chain()
        if number < 0:
            return -1, 0
        chain = self.chains[number]
        assert chain is not None
        begin, values = len(chain), values[: BLOCKS_MAX - len(chain)]
        position = number << OFFSET_BITS | begin
        packed = bytearray().join(values)
        num = self._table.insert(values, packed, position)
        del packed[num * VALUE_BYTES :]
        chain.append(packed)
        return position, num

    def _is_open(self, number: int, offset: int) -> bool:
        chain = self.chains[number]
        return chain is not None and offset + 1 == len(chain) < BLOCKS_MAX

    def _pile_number(self, bit: int) -> int:
        number, pile = self._piles.get(bit, (-1, None))
        if pile is None or self.chains[number] is not pile or len(pile) == BLOCKS_MAX:
            number = self._new_chain()
            if number >= 0:
                self._piles[bit] = number, self._chain(number << OFFSET_BITS)
        return number

    def _new_chain(self) -> int:
        """Its number; -1: there are too many."""
        if self._free:
            number = self._free.pop()
            self.chains[number] = Chain(self._num_layers)
            return number
        if len(self.chains) >= CHAINS_MAX:
            return -1
        self.chains.append(Chain(self._num_layers))
        return len(self.chains) - 1

    def _tidy(self, number: int, chain: Chain) -> None:
        """Forget blocks that nobody holds: the last ones, and others once they are many."""
        num, first = chain.num_lasting, number << OFFSET_BITS
        if num < len(chain):
            gone = chain.packed(num, len(chain))
            chain.shorten(num)
            self._table.remove(gone, first | num)
        if not num:
            self.chains[number] = None
            self._free.append(number)
            return
        if 8 * (chain.num_dead - DEAD_BLOCKS_MAX) <= num:
            return
        leaving = [(begin, chain.packed(begin, end)) for begin, end in chain.ranges(live=False)]
        live, to = list(chain.ranges(live=True)), 0
        moving = [(begin, chain.packed(begin, end)) for begin, end in live]
        chain.keep(live)
        for begin, values in leaving:
            self._table.remove(values, first | begin)
        for begin, values in moving:
            if begin != to:
                self._table.move(values, first | begin, first | to)
            to += len(values) // VALUE_BYTES
