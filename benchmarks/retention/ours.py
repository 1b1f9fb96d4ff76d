"""Our coordinator as a cache of the benchmark."""

from benchmarks.retention.workloads import Request, answer_of
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout

BLOCK = 16
MAX_TOKENS = 1 << 18


class OurCache:
    """One full group and windows beside it.

    Args:
        num_blocks: of the pool.
        windows: tokens of each window.
        policy: what is kept.
        step_tokens: most that one step computes.
    """

    def __init__(
        self, num_blocks: int, windows: list[int], policy: CachePolicy, step_tokens: int
    ) -> None:
        specs: list[Spec] = [FullAttentionSpec(BLOCK, 8, 128, 2)]
        specs += [SlidingWindowSpec(BLOCK, 8, 128, 2, window) for window in windows]
        self._kv = KVCacheCoordinator(
            KVCacheLayout.one_layer_per_group(specs),
            num_blocks,
            max_model_tokens=MAX_TOKENS,
            max_step_tokens=step_tokens,
            policy=policy,
        )
        self._hasher = BlockHasher(b"benchmark", BLOCK)
        self._sequences: dict[int, tuple[KVSequence, Request]] = {}

    def begin(self, number: int, request: Request) -> int | None:
        """See `Cache`."""
        made = KVSequence(number, list(request.prompt))
        self._hasher.extend(made.hashes, made.token_ids)
        hit = self._kv.find_longest_cache_hit(made, made.num_tokens - 1)
        if not self._kv.admit(number, made.num_tokens, hit):
            return None
        self._sequences[number] = made, request
        return hit.num_tokens

    def compute(self, number: int, num_new: int) -> bool:
        """See `Cache`."""
        made, _ = self._sequences[number]
        if not self._kv.allocate(made, num_new_tokens=num_new):
            return False
        done = self._kv.num_scheduled_tokens(number)
        self._kv.publish(number, done)
        self._kv.release_out_of_window(number, done)
        if done >= made.num_tokens:
            self._kv.unpromise(number)
        return True

    def answer(self, number: int, num_new: int) -> bool:
        """See `Cache`."""
        made, request = self._sequences[number]
        num_answered = made.num_tokens - len(request.prompt)
        answer = answer_of(number, num_answered + num_new)[num_answered:]
        if not self._kv.allocate(made, num_new_tokens=num_new):
            return False
        made.token_ids += answer
        self._hasher.extend(made.hashes, made.token_ids)
        self._kv.publish(number, made.num_tokens)
        return True

    def end(self, number: int) -> None:
        """See `Cache`."""
        self._kv.free(number)
        del self._sequences[number]
