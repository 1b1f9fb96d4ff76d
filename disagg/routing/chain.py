"""Blocks in the order in which they were stored, and who holds them: one mask per run."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

VALUE_BYTES = 32
"""Of a chain value, a sha256."""
OFFSET_BITS = 14
BLOCKS_MAX = 1 << OFFSET_BITS
_MORE = bytes(min(255, n + 1) for n in range(256))
_LESS = bytes(max(0, n - 1) for n in range(256))


class Runs:
    """A mask per block of a chain, kept once per run of equal masks."""

    __slots__ = ("masks", "starts")

    def __init__(self) -> None:
        self.starts = [0]
        self.masks = [0]

    def cut(self, at: int, end: int) -> int:
        """Number of the run that starts at ``at``, cut off the one before; ``end``: after all."""
        if at == end:
            return len(self.starts)
        number = bisect_left(self.starts, at)
        if number == len(self.starts) or self.starts[number] != at:
            self.starts.insert(number, at)
            self.masks.insert(number, self.masks[number - 1])
        return number

    def merge(self, first: int, last: int) -> None:
        """Join equal neighbours among the runs ``first - 1 .. last``."""
        starts, masks = self.starts, self.masks
        for number in range(min(last, len(masks) - 1), max(first - 1, 0), -1):
            if masks[number] == masks[number - 1]:
                del masks[number], starts[number]

    def between(self, begin: int, end: int) -> tuple[list[int], list[int]]:
        """Starts and masks of the runs in a range; the first one starts at ``begin``."""
        first, last = bisect_right(self.starts, begin), bisect_left(self.starts, end)
        starts = self.starts[first - 1 : last]
        starts[0] = begin
        return starts, self.masks[first - 1 : last]


class Chain:
    """Up to 16,384 blocks; mostly a piece of a prompt, but nothing depends on their order.

    Attributes:
        values: of the blocks, packed.
        layers: holders per layer; a layer is one place (a pool, a tier) of one group.
        num_dead: blocks that nobody holds.
    """

    __slots__ = ("_num_layers_used", "_proven", "layers", "num_dead", "values")

    def __init__(self, num_layers: int) -> None:
        self.values = bytearray()
        self._num_layers_used = bytearray()
        """Per block the layers in which somebody holds it."""
        self.layers: list[Runs | None] = [None] * num_layers
        self.num_dead = 0
        self._proven = (0, 0)
        """A range that is known to be a piece of a prompt."""

    def __len__(self) -> int:
        return len(self._num_layers_used)

    def value(self, offset: int) -> bytes:
        """The value of one block."""
        return bytes(self.values[offset * VALUE_BYTES : (offset + 1) * VALUE_BYTES])

    def packed(self, begin: int, end: int) -> bytes:
        """The values of a range."""
        return bytes(self.values[begin * VALUE_BYTES : end * VALUE_BYTES])

    def append(self, packed: bytearray) -> None:
        """Add blocks that nobody holds yet; the first ones are kept as they are, not copied."""
        end = len(self)
        for runs in self.layers:
            if runs is not None and runs.masks[-1]:
                runs.starts.append(end)
                runs.masks.append(0)
        if end:
            self.values += packed
        else:
            self.values = packed
        num = len(packed) // VALUE_BYTES
        self._num_layers_used += bytes(num)
        self.num_dead += num

    def num_equal(self, offset: int, values: Sequence[bytes], start: int) -> int:
        """Blocks from ``offset`` on whose values are ``values[start:]``, of which the first is."""
        return _num_equal(
            min(len(self) - offset, len(values) - start),
            lambda first, end: self._has(offset + first, values[start + first : start + end]),
        )

    def num_in_prompt(self, offset: int, values: Sequence[bytes], start: int) -> int:
        """The same, for the values of a prompt; perhaps fewer than there are.

        Each of those names all before it. So where this chain has once been found to be a piece of
        a prompt, another one that has the same value there has the same values before it, and is
        compared at one place instead of at each. What workers tell proves no order.
        """
        num = self._last_equal(offset, values, start) + 1
        begin, end = self._proven
        if begin <= offset and offset + num <= end:
            return num
        if num > 1 and not self._has(offset, values[start : start + num]):
            return 1
        if begin <= offset < end:  # one block in common joins two pieces
            self._proven = begin, offset + num
        elif num > end - begin:
            self._proven = offset, offset + num
        return num

    def num_equal_back(self, offset: int, values: Sequence[bytes], start: int) -> int:
        """As `num_equal`, from ``offset`` down: the last ones come first."""
        return _num_equal(
            min(offset + 1, len(values) - start),
            lambda first, end: self._has(
                offset + 1 - end, values[start + first : start + end][::-1]
            ),
        )

    def _last_equal(self, offset: int, values: Sequence[bytes], start: int) -> int:
        """The last of a stretch of equal blocks, if it is one: where not, some equal block."""
        mine, num = self.values, min(len(self) - offset, len(values) - start)
        low, high = 0, num
        hint = self._proven[1] - 1 - offset  # where the prompt before may have ended
        probe = num - 1
        while high - low > 1:
            if low <= hint < high:
                probe = max(hint, low + 1)
            if mine.startswith(values[start + probe], (offset + probe) * VALUE_BYTES):
                low = probe
            else:
                high = probe
            probe = (low + high) // 2
        return low

    def _has(self, offset: int, values: Sequence[bytes]) -> bool:
        return self.values.startswith(b"".join(values), offset * VALUE_BYTES)

    def hold(self, layer: int, begin: int, end: int, bit: int) -> int:
        """Somebody has these blocks now; returns how many of them were new there."""
        runs = self.layers[layer]
        if runs is None:
            runs = self.layers[layer] = Runs()
        first, last, num_new = runs.cut(begin, len(self)), runs.cut(end, len(self)), 0
        for number in range(first, last):
            mask = runs.masks[number]
            if not mask & bit:
                num_new += self._touch(runs, number, _MORE if not mask else None)
                runs.masks[number] = mask | bit if mask else bit
        runs.merge(first, last)
        return num_new

    def drop(self, layer: int, begin: int, end: int, bit: int) -> int:
        """Somebody has these blocks no more; returns how many of them were there."""
        runs = self.layers[layer]
        if runs is None:
            return 0
        first, last, num_gone = runs.cut(begin, len(self)), runs.cut(end, len(self)), 0
        for number in range(first, last):
            mask = runs.masks[number]
            if mask & bit:
                num_gone += self._touch(runs, number, _LESS if mask == bit else None)
                runs.masks[number] = mask ^ bit
        runs.merge(first, last)
        return num_gone

    def has(self, bit: int) -> bool:
        """Whether somebody has a block of it, in any layer."""
        return any(mask & bit for runs in self.layers if runs is not None for mask in runs.masks)

    def _touch(self, runs: Runs, number: int, change: bytes | None) -> int:
        """Length of a run; a layer begins or ceases to be used there where there is a change."""
        begin = runs.starts[number]
        end = runs.starts[number + 1] if number + 1 < len(runs.starts) else len(self)
        if change is not None:
            before = self._num_layers_used[begin:end]
            after = before.translate(change)
            self._num_layers_used[begin:end] = after
            self.num_dead += after.count(0) - before.count(0)
        return end - begin

    @property
    def num_lasting(self) -> int:
        """Blocks up to the last one that somebody holds."""
        return len(self._num_layers_used.rstrip(b"\0"))

    def shorten(self, num: int) -> None:
        """Forget all blocks from one on, of which nobody holds any."""
        for runs in self.layers:
            if runs is not None:
                while len(runs.starts) > 1 and runs.starts[-1] >= num:
                    del runs.starts[-1], runs.masks[-1]
        begin, end = self._proven
        self._proven = min(begin, num), min(end, num)
        self.num_dead -= len(self) - num
        del self.values[num * VALUE_BYTES :], self._num_layers_used[num:]
        if 8 * len(self.values) < 7 * self.values.__alloc__():  # else half of it could lie idle
            self.values, self._num_layers_used = self.values[:], self._num_layers_used[:]

    def ranges(self, *, live: bool) -> Iterator[tuple[int, int]]:
        """Begin and end of what somebody holds, or of what nobody does."""
        begin = None
        for offset, used in enumerate(self._num_layers_used):
            if bool(used) == live:
                begin = offset if begin is None else begin
            elif begin is not None:
                yield begin, offset
                begin = None
        if begin is not None:
            yield begin, len(self)

    def keep(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Forget all blocks outside these ranges; the others close up."""
        for number, runs in enumerate(self.layers):
            if runs is not None:
                self.layers[number] = _kept(runs, ranges)
        self._proven = (0, 0)
        self.values = bytearray().join(
            self.values[a * VALUE_BYTES : b * VALUE_BYTES] for a, b in ranges
        )
        self._num_layers_used = bytearray().join(self._num_layers_used[a:b] for a, b in ranges)
        self.num_dead = self._num_layers_used.count(0)


def _num_equal(num_max: int, are_equal: Callable[[int, int], bool]) -> int:
    """How many are equal, of which the first one is.

    The steps double as long as all in them are, then halve: it costs as much as what is found, or
    an event of many blocks that lie here and there would cost the square of their number.
    """
    num, step, grows = 1, 1, True
    while step := min(step, num_max - num):
        if are_equal(num, num + step):
            num += step
        else:
            grows = False
        step = 2 * step if grows else step // 2
    return num


def _kept(runs: Runs, ranges: Sequence[tuple[int, int]]) -> Runs | None:
    kept, at = Runs(), 0
    kept.starts.clear()
    kept.masks.clear()
    for begin, end in ranges:
        for start, mask in zip(*runs.between(begin, end), strict=True):
            if not kept.masks or kept.masks[-1] != mask:
                kept.starts.append(at + start - begin)
                kept.masks.append(mask)
        at += end - begin
    return kept if any(kept.masks) else None
