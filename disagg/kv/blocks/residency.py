"""How long contents stay in the prefix cache: times of a sample of the blocks."""

from bisect import bisect_left
from collections.abc import Iterable

from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram

LIFETIME, IDLE, REUSE_GAP = "lifetime", "idle", "reuse_gap"


class BlockResidency:
    """Observes the blocks whose number is a multiple of ``every``.

    *lifetime* is the time from a content's publication to its eviction, *idle* that from when it
    was last found (or published) to its eviction, *reuse_gap* that between two times at which it
    was found (or published and found). Which content a block gets does not depend on its number,
    so the blocks observed stand for all.

    Args:
        every: distance of the blocks observed.
        num_blocks: blocks of the pool.

    Attributes:
        now_ms: the time, as far as the owner has told it: figures are as coarse as it does.
    """

    def __init__(self, every: int, num_blocks: int) -> None:
        self.now_ms = 0
        self._observed = frozenset(range(every, num_blocks, every))
        self._since: dict[int, tuple[int, int]] = {}
        """When the content was published, when it was found last."""
        self._histograms = {name: _Histogram() for name in (LIFETIME, IDLE, REUSE_GAP)}

    def published(self, block_ids: Iterable[int]) -> None:
        """These blocks can be found from now on."""
        for block in self._observed.intersection(block_ids):
            self._since[block] = (self.now_ms, self.now_ms)

    def found(self, block_ids: Iterable[int]) -> None:
        """A request found the contents of these blocks."""
        for block in self._known(block_ids):
            published_ms, last_ms = self._since[block]
            self._histograms[REUSE_GAP].add(self.now_ms - last_ms)
            self._since[block] = (published_ms, self.now_ms)

    def evicted(self, block_ids: Iterable[int]) -> None:
        """These blocks were evicted to make room."""
        for block in self._known(block_ids):
            published_ms, last_ms = self._since.pop(block)
            self._histograms[LIFETIME].add(self.now_ms - published_ms)
            self._histograms[IDLE].add(self.now_ms - last_ms)

    def forgotten(self, block_ids: Iterable[int]) -> None:
        """These blocks lost their contents otherwise, which says nothing of the pool's size."""
        for block in self._known(block_ids):
            del self._since[block]

    def _known(self, block_ids: Iterable[int]) -> list[int]:
        return list(filter(self._since.__contains__, block_ids))

    def histograms(self) -> tuple[ResidencyHistogram, ...]:
        """All times so far, by name."""
        return tuple(
            ResidencyHistogram(name, tuple(one.counts), one.sum_ms)
            for name, one in sorted(self._histograms.items())
        )


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(RESIDENCY_BOUNDS_MS) + 1)
        self.sum_ms = 0

    def add(self, time_ms: int) -> None:
        self.counts[bisect_left(RESIDENCY_BOUNDS_MS, time_ms)] += 1
        self.sum_ms += time_ms
