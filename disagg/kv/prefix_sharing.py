"""Both sides of a prefix pull: what the reader takes for it, what an owner has of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.blocks.hits import CacheHit, ExternalReservation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.prefix_match import PrefixMatcher
from disagg.kv.sequence import KVSequence
from disagg.kv.transfer_plan import first_blocks, reservation_of

UNKNOWN = b""
"""Stands for chain values that were not sent; no block is cached under it."""


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """What a reader wants to pull.

    Attributes:
        num_tokens: the longest boundary that it has room for.
        first_hash: index of the first of ``hashes``.
        hashes: chain values from there to ``num_tokens``: all that some boundary may need.
        first_lacked: per group, position of the first token that the reader does not hold itself.
        alignment_tokens: its prefixes can end at multiples of it.
    """

    num_tokens: int
    first_hash: int
    hashes: tuple[bytes, ...]
    first_lacked: tuple[int, ...]
    alignment_tokens: int = 1


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What an owner has of it; valid until the next call that allocates: no holds yet.

    Attributes:
        num_tokens: the longest boundary at which reader and owner together have all groups.
        blocks: per group, the (block index, block id) pairs that the reader lacks there.
    """

    num_tokens: int
    blocks: tuple[tuple[tuple[int, int], ...], ...]


class PrefixSharing:
    """Prefixes shared between workers: pulls over one worker's coordinator.

    Args:
        kv: the coordinator. EAGLE groups are not proven further here.
    """

    def __init__(self, kv: KVCacheCoordinator) -> None:
        self._kv = kv
        self._alignment = kv.managers[0].alignment_tokens
        self._matcher = PrefixMatcher(kv.managers, self._alignment, frozenset())

    # -- the reader ---------------------------------------------------------------------------

    def boundary(self, num_tokens: int) -> int:
        """The last position up to ``num_tokens`` at which prefixes can end."""
        return num_tokens - num_tokens % self._alignment

    def reserve(
        self,
        request: KVSequence,
        num_tokens: int,
        num_tokens_total: int,
        hit: CacheHit | None = None,
    ) -> ExternalReservation | None:
        """Hold own hits, allocate the rest up to a boundary, promise the rest of the prompt.

        Full-attention groups hold their joint hit; other kinds lack all that a query at
        ``num_tokens`` sees. Nothing is published before the coordinator's ``commit_external``;
        its ``free`` gives all back.

        Args:
            request: a sequence that has not begun.
            num_tokens: a `boundary`.
            num_tokens_total: the prompt's length.
            hit: what to hold in place of those hits, per group from the first block on that a
                query at ``num_tokens`` sees; null before it (see `TieredPrefix`).

        Returns:
            None if it does not fit now; nothing has changed then.
        """
        kv, key = self._kv, request.key
        if hit is None:
            hit = self._matcher.find_always_visible(request.hashes, num_tokens)
        if not kv.admit(key, num_tokens_total, hit):
            return None
        num_external = num_tokens - hit.num_tokens
        if not kv.allocate(
            request, num_new_tokens=0, num_external_tokens=num_external, delay_publication=True
        ):
            kv.unpromise(key)
            return None
        if not num_external:  # windows and states come from outside all the same
            for manager in kv.managers:
                manager.grow_external(key, num_tokens)
        return reservation_of(kv.managers, key, hit, num_tokens)

    def wanted(
        self, request: KVSequence, reservation: ExternalReservation, own_tokens: int
    ) -> WantedPrefix:
        """The prefix to request of an owner, if boundaries up to ``own_tokens`` are of no use."""
        num_tokens = reservation.num_external_tokens
        shortest = min(own_tokens + self._alignment, num_tokens)
        start = min(
            max(m.skipped_tokens(shortest), tokens)
            for m, tokens in zip(self._kv.managers, reservation.hit_tokens, strict=True)
        )
        size = self._kv.layout.hash_block_tokens
        start -= start % max(m.block_tokens for m in self._kv.managers)
        return WantedPrefix(
            num_tokens,
            start // size,
            tuple(request.hashes[start // size : num_tokens // size]),
            reservation.hit_tokens,
            self._alignment,
        )

    def publish_intact(
        self, request: KVSequence, num_tokens: int, failed: Collection[tuple[int, int]]
    ) -> None:
        """Publish the pulled blocks that arrived; ``failed`` are (group, block index) pairs.

        The sequence itself stays unusable: free it.
        """
        if not request.publishes:
            return
        for manager in self._kv.managers:
            bad = {block_index for group, block_index in failed if group == manager.group}
            tokens = request.token_ids if self._kv.events_with_tokens else ()
            if not bad:
                manager.publish(request.key, request.hashes, tokens, num_tokens, True)
            else:
                manager.publish_around(request.key, request.hashes, tokens, num_tokens, bad)

    # -- the owner ----------------------------------------------------------------------------

    def match(self, wanted: WantedPrefix) -> SharedPrefix | None:
        """The longest boundary at which both sides together have all groups; no effects.

        It is one for both, whatever their block sizes. None where there is none, or the request
        does not fit the groups of this model.
        """
        managers = self._kv.managers
        num_hashes = wanted.first_hash + len(wanted.hashes)
        known_end = num_hashes * self._kv.layout.hash_block_tokens
        too_far = wanted.first_hash * self._kv.layout.hash_block_tokens > self._kv.max_model_tokens
        if len(wanted.first_lacked) != len(managers) or too_far:
            return None
        hashes = [UNKNOWN] * wanted.first_hash + list(wanted.hashes)
        alignment = lcm(self._alignment, wanted.alignment_tokens)
        end = min(wanted.num_tokens, known_end)
        end -= end % alignment
        runs: list[list[int]] = [[] for _ in managers]
        firsts = list(first_blocks(managers, wanted.first_lacked))
        for manager in self._matcher.nesting:
            first = firsts[manager.group]
            start = manager.spanned_tokens(first)
            chain = manager.chain(hashes)[first:]
            size = manager.block_tokens
            (run,) = manager.match([manager.group], chain, max(0, end - start), size, False)
            runs[manager.group] = run
            end = min(end, start + manager.spanned_tokens(len(run)))
            end -= end % alignment
        stable = False
        while end and not stable:
            stable = True
            for manager in self._matcher.others:
                (run,) = manager.match(
                    [manager.group], manager.chain(hashes), end, alignment, False
                )
                runs[manager.group], firsts[manager.group] = run, 0
                reached = manager.spanned_tokens(len(run))
                stable = stable and reached == end
                end = min(end, reached)
        blocks = tuple(map(_seen, managers, runs, firsts, [end] * len(managers)))
        return SharedPrefix(end, blocks) if end and any(blocks) else None


def _seen(
    manager: GroupManager, run: Sequence[int], first: int, num_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Of a run that begins at block index ``first``, what a query at ``num_tokens`` reads."""
    if manager.skipped_tokens(num_tokens) >= num_tokens:
        return ()
    start, end = manager.first_block(num_tokens), manager.num_blocks(num_tokens)
    return tuple(
        (block_index, block)
        for block_index, block in enumerate(run, first)
        if start <= block_index < end and block != NULL_BLOCK
    )
