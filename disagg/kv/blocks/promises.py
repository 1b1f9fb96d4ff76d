"""Blocks kept back for requests that were admitted for their whole prompt."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from disagg.errors import InvariantViolation
from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.blocks.hits import CacheHit


@dataclass(slots=True)
class _Promise:
    num_blocks: int
    num_tokens: int
    hit: CacheHit | None
    expected: set[int] = field(default_factory=set)


class PromiseBook:
    """Keeps ``sum of promises + slack <= free blocks``, so that an admitted prompt never waits.

    A promise is what the request can still need at once. Window blocks it drops come back to it;
    if somebody else holds such a block by then, its drop frees nothing. Therefore the pool keeps
    one block of *slack* per shared block that a promise expects back: whoever comes second pays.

    Args:
        pool: the worker's pool.
        returning_blocks: blocks of a request that it will drop as it goes on.
    """

    def __init__(
        self, pool: BlockPool, returning_blocks: Callable[[Hashable], Iterable[int]]
    ) -> None:
        self._pool = pool
        self._returning_blocks = returning_blocks
        self._promises: dict[Hashable, _Promise] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, key: object) -> bool:
        return key in self._promises

    @property
    def num_promised(self) -> int:
        """Free blocks that unpromised requests may not take."""
        return self._total + self._pool.slack.num_blocks

    def available(self, key: Hashable) -> int:
        """Free blocks that ``key`` may take (negative while named holders overdraw)."""
        left = self._pool.num_free - self._total - self._pool.slack.num_blocks
        own = self._promises.get(key)
        return left + own.num_blocks if own else left

    def num_tokens(self, key: Hashable) -> int:
        """Length that ``key`` was admitted for."""
        return self._promises[key].num_tokens

    def admitted_hit(self, key: Hashable, hit: CacheHit | None) -> CacheHit | None:
        """Hit a request starts with: the one it was admitted with, if it was."""
        promise = self._promises.get(key)
        if promise is None:
            return hit
        if hit is not None and hit is not promise.hit:
            raise InvariantViolation(f"{key!r} was admitted with another hit")
        return promise.hit

    def sharing_cost(self, key: Hashable, hit_blocks: Iterable[int]) -> int:
        """Slack that ``key`` must pay to adopt blocks which promises expect back."""
        own = set(self._pool.holders().get(("promise", key), ()))
        return self._pool.slack.growth(block for block in hit_blocks if block not in own)

    def give(
        self,
        key: Hashable,
        num_blocks: int,
        num_tokens: int,
        hit: CacheHit | None,
        hit_blocks: Sequence[int],
        returning: Iterable[int],
    ) -> bool:
        """Promise ``num_blocks`` more and hold the hit until it is adopted; all or nothing.

        Args:
            key: a request without a promise.
            num_blocks: most fresh blocks it will need at once.
            num_tokens: length it is admitted for.
            hit: cached prefix it will adopt.
            hit_blocks: the blocks of it that will be held.
            returning: those of them that it will drop as it goes on.
        """
        if key in self._promises:
            raise InvariantViolation(f"{key!r} has a promise already")
        pool = self._pool
        own = set(returning)
        cost = num_blocks + pool.num_leaving(hit_blocks)
        cost += pool.slack.growth(own, 1)
        cost += pool.slack.growth(block for block in hit_blocks if block not in own)
        if cost > self.available(key):
            return False
        if hit_blocks:
            pool.hold(("promise", key), hit_blocks)
        self._promises[key] = _Promise(num_blocks, num_tokens, hit, own)
        self._total += num_blocks
        pool.slack.expect_back(own, 1)
        return True

    def update(self, key: Hashable, num_blocks: int) -> None:
        """Change a promise to ``num_blocks``, which is what its request can still need at once."""
        promise = self._promises[key]
        self._total += num_blocks - promise.num_blocks
        promise.num_blocks = num_blocks
        now = set(self._returning_blocks(key))
        self._pool.slack.expect_back(now - promise.expected, 1)
        self._pool.slack.expect_back(promise.expected - now, -1)
        promise.expected = now

    def adopted(self, key: Hashable) -> None:
        """Drop the promise's hold on a hit that its request holds itself now."""
        self._pool.drop(("promise", key))

    def end(self, key: Hashable) -> None:
        """Take the promise back; unknown keys are ignored."""
        promise = self._promises.pop(key, None)
        if promise is not None:
            self._total -= promise.num_blocks
            self._pool.slack.expect_back(promise.expected, -1)
            self._pool.drop(("promise", key))

    def check(self) -> None:
        """Verify the sums of all promises; raises InvariantViolation."""
        if self._total != sum(promise.num_blocks for promise in self._promises.values()):
            raise InvariantViolation("the total of promises is not their sum")
        if any(promise.num_blocks < 0 for promise in self._promises.values()):
            raise InvariantViolation("a promise is negative")
