"""What of a sequence can be found: published as it is computed, kept as the policy says."""

from collections.abc import Sequence

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.prefix_match import PrefixMatcher
from disagg.kv.sequence import NEVER, SequenceState


class Publication:
    """Puts full blocks into the prefix cache, and takes out what no kept position sees.

    Args:
        managers: one per group.
        moving: those of them whose tables drop blocks as their sequence grows.
        matcher: finds what is known of a prompt when it begins.
        hash_block_tokens: tokens per link of the hash chain.
        policy: what can be found, and for how long.
        with_tokens: events carry token ids.
    """

    def __init__(
        self,
        managers: Sequence[GroupManager],
        moving: Sequence[GroupManager],
        matcher: PrefixMatcher,
        hash_block_tokens: int,
        policy: CachePolicy,
        with_tokens: bool,
    ) -> None:
        self._managers, self._moving = managers, () if policy.retention.is_dense else moving
        self._matcher = matcher
        self._alignment_tokens = managers[0].alignment_tokens
        self._hash_block_tokens = hash_block_tokens
        self._policy = policy
        self._with_tokens = with_tokens

    def begin(self, sequence: SequenceState, hit: CacheHit | None) -> None:
        """Note which positions of a sequence that begins with ``hit`` stay findable."""
        request = sequence.request
        if not request.publishes:
            sequence.publish_from = NEVER
        if self._moving:
            known = self._matcher.find_always_visible(request.hashes, request.num_tokens - 1)
            adopted = hit.num_tokens if hit else 0
            sequence.kept = (request.num_tokens - 1, request.num_tokens, known.num_tokens, adopted)

    def publish(self, sequence: SequenceState, num_computed_tokens: int) -> None:
        """Make the full blocks of computed tokens findable, those that have their hash already.

        Raises:
            InvariantViolation: its external tokens are not valid yet.
        """
        request = sequence.request
        sequence.require_committed("publish")
        tokens = request.token_ids if self._with_tokens else ()
        hashes = request.hashes
        deduplicate = self._policy.deduplicate
        for manager in self._managers:
            manager.publish(request.key, hashes, tokens, num_computed_tokens, deduplicate)
        aligned = self._alignment_tokens
        done = num_computed_tokens - num_computed_tokens % aligned
        if len(hashes) * self._hash_block_tokens >= done:
            sequence.publish_from = done + aligned

    def forget_skipped(self, sequence: SequenceState, num_computed_tokens: int) -> None:
        """Take out of the cache what the window leaves behind and no kept position sees."""
        for manager in self._moving:
            manager.forget_skipped(
                sequence.request.key, num_computed_tokens, sequence.kept, self._policy.retention
            )
