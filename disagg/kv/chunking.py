"""Where the chunks of a prompt should end, so that others find what it leaves."""

from collections.abc import Sequence

from disagg.kv.kinds.manager import GroupManager
from disagg.kv.prefix_match import PrefixMatcher
from disagg.kv.sequence import KVSequence


class Chunking:
    """Chunk ends of the prompts of one coordinator.

    Args:
        managers: one per group.
        matcher: finds prefixes in their caches.
    """

    def __init__(self, managers: Sequence[GroupManager], matcher: PrefixMatcher) -> None:
        self._matcher = matcher
        self._alignment = matcher.alignment_tokens
        self._has_states = any(manager.hits_end_with_steps for manager in managers)

    def known_end(self, request: KVSequence) -> int:
        """Where a prompt leaves what is known, as other prompts will; no effects.

        The prefix that all full-attention groups have, whatever the others hold; 0 where there are
        no others. Chunks of models with linear states end there (``chunk_end``), a sparse retention
        keeps it, and what of it was not hit is the uncached common prefix.
        """
        if not self._matcher.others:
            return 0
        known = self._matcher.find_always_visible(request.hashes, request.num_tokens - 1)
        return known.num_tokens - known.num_tokens % self._alignment

    def chunk_end(self, request: KVSequence, known_end: int, start: int, room: int) -> int | None:
        """Where a chunk of a prompt that begins at ``start`` should end; no effects.

        Linear states are kept only where a step ends. They are worth most where a known prefix is
        left and at the last block end before the last token, from where a repeated or longer prompt
        goes on; else at any block end.

        Returns:
            None if no group has states, or no such end is among the next ``room`` tokens.
        """
        if not self._has_states:
            return None
        if start < known_end <= start + room:
            return known_end
        end = min(start + room, request.num_tokens - 1)
        end -= end % self._alignment
        return end if end > start else None
