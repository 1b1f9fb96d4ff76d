"""One coordinator per worker: block tables of all sequences in all groups, all or nothing.

A sequence's life: ``find_longest_cache_hit`` -> (``admit``) -> ``allocate`` per step ->
``hold_step`` .. ``release_step`` -> ``publish`` -> ``release_out_of_window`` -> ``free``; or
``reserve_external`` -> ``commit_external`` -> ``allocate`` .. where the prompt's KV is pulled.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence

from disagg.errors import ConfigError, InvariantViolation
from disagg.kv.admission import Admission
from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.hits import CacheHit, ExternalReservation
from disagg.kv.blocks.step_holds import StepHolds
from disagg.kv.chunking import Chunking
from disagg.kv.event_log import KVEventLog
from disagg.kv.prefix_match import PrefixMatcher
from disagg.kv.publication import Publication
from disagg.kv.sequence import NEVER, KVSequence, SequenceState, sequence_of
from disagg.kv.sequence_tables import SequenceTables, alignment_tokens, create_managers
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.kv.slots import Slots
from disagg.kv.transfer_plan import reservation_of


class KVCacheCoordinator:
    """Hybrid KV cache of one worker, for one control thread.

    Args:
        layout: groups of the model.
        num_blocks: blocks in the pool's tensor, the null block included.
        max_model_tokens: longest sequence.
        max_step_tokens: most tokens of one sequence that are not published yet when its next step
            is launched, those of that step included; with n steps in flight, n times the largest
            chunk.
        steps_max: steps in flight at once that one sequence is in; more are refused.
        eagle_groups: groups whose hits must be proven one block further (speculative drafts).
        num_lookahead_tokens: slots that allocations have room for behind their tokens, for drafts
            of the tokens that follow; where blocks are lacking a sequence that has begun goes on
            without. What is in them is published once it was accepted.
        policy: what of the finished blocks can be found, and for how long.
        events_max: bound of the event buffer.
        events_with_tokens: carry token ids in ``BlocksStored``.

    Attributes:
        tables: block tables of all sequences, to read.
        slots: how many slots sequences get, those for drafts included.
        alignment_tokens: every hit is a multiple of it.
        chunking: where chunks of a prompt should end.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        *,
        max_model_tokens: int,
        max_step_tokens: int,
        steps_max: int = 1,
        eagle_groups: Collection[int] = (),
        num_lookahead_tokens: int = 0,
        policy: CachePolicy = CachePolicy(),  # noqa: B008 (frozen)
        events_max: int = 4096,
        events_with_tokens: bool = False,
    ) -> None:
        if max_model_tokens < 1 or max_step_tokens < 1:
            raise ConfigError("token limits must be positive", param="max_model_tokens")
        self.layout = layout
        self.max_model_tokens = max_model_tokens
        self.num_lookahead_tokens = num_lookahead_tokens
        num_groups = len(layout.groups)  # and one index for what follows a state's first block
        self.events = KVEventLog(lambda: self.pool.cache.values(), num_groups, events_max)
        self.pool = BlockPool(num_blocks, num_groups + 1, self.events.append, policy)
        self.policy = policy
        self.events_with_tokens = events_with_tokens
        self.managers = create_managers(
            layout,
            self.pool,
            max_model_tokens=max_model_tokens,
            max_step_tokens=max_step_tokens,
            steps_max=steps_max,
            eagle_groups=eagle_groups,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        self.tables = SequenceTables(self.managers)
        self.alignment_tokens = alignment_tokens(layout)
        self._matcher = PrefixMatcher(self.managers, self.alignment_tokens, frozenset(eagle_groups))
        self.chunking = Chunking(self.managers, self._matcher)
        self._publication = Publication(
            self.managers,
            self.tables.moving,
            self._matcher,
            layout.hash_block_tokens,
            policy,
            events_with_tokens,
        )
        self._steps = StepHolds(self.pool, steps_max)
        self.admission = Admission(self.managers, self.pool)
        self._promises = self.admission.promises
        self._sequences: dict[Hashable, SequenceState] = {}
        self.slots = Slots(self._sequences, num_lookahead_tokens, max_model_tokens)

    # -- looking up ---------------------------------------------------------------------------

    def find_longest_cache_hit(self, request: KVSequence, max_tokens: int) -> CacheHit:
        """Longest prefix of at most ``max_tokens`` tokens that every group has; no effects.

        The last token of a prompt must be computed to get logits: pass ``num_tokens - 1``.
        """
        return self._matcher.find(request.hashes, max_tokens)

    def group_hit_tokens(self, request: KVSequence) -> tuple[int, ...]:
        """Per group on its own (equal specs jointly): the prefix it still has; no effects."""
        return self._matcher.group_tokens(request.hashes, request.num_tokens)

    # -- admission ----------------------------------------------------------------------------

    def admit(self, key: Hashable, num_tokens_total: int, hit: CacheHit | None = None) -> bool:
        """Promise the blocks that a whole prompt will need at its peak; all or nothing.

        Until ``unpromise`` or ``free`` other sequences can take only what is left, so the prompt
        never waits for a block.
        Window blocks it drops come back to the promise. The hit is held at once, and the first
        ``allocate`` adopts it.

        Returns:
            False if it does not fit now; nothing has changed then.
        """
        if key in self._sequences:
            raise InvariantViolation(f"{key!r} is admitted after it began")
        return self.admission.admit(key, self.slots.total(num_tokens_total), hit)

    def unpromise(self, key: Hashable) -> None:
        """Give up what is left of a promise; idempotent."""
        self._promises.end(key)

    # -- growing ------------------------------------------------------------------------------

    def allocate(
        self,
        request: KVSequence,
        *,
        num_new_tokens: int,
        hit: CacheHit | None = None,
        num_external_tokens: int = 0,
        delay_publication: bool = False,
    ) -> bool:
        """Give a sequence the slots of its next step, in all groups or in none.

        Out-of-window blocks are dropped first, also if the rest fails, but none that a step in
        flight sees or has yet to publish. On the first call the
        blocks of ``hit`` are held (all groups' hits before any group allocates, else one group
        could evict another's hit), and window groups get no blocks for external tokens that are
        out of sight.

        Args:
            request: the sequence; its key must be new or allocated before.
            num_new_tokens: tokens computed in this step.
            hit: prefix to adopt, on the first call only.
            num_external_tokens: tokens after the hit whose KV comes from elsewhere.
            delay_publication: the external tokens are not valid before ``commit_external``.

        Returns:
            False if blocks are lacking.
        """
        key = request.key
        sequence = self._sequences.get(key)
        if sequence is not None:
            if hit is not None or num_external_tokens:
                raise InvariantViolation(f"{key!r} has begun; hits and external tokens come first")
            if sequence.num_external is not None and num_new_tokens:
                sequence.require_committed("compute on")
            if 0 < num_new_tokens <= sequence.quiet_end - sequence.num_scheduled:
                sequence.num_scheduled += num_new_tokens
                return True
            return self._go_on(sequence, num_new_tokens)
        hit = self._promises.admitted_hit(key, hit)
        computed = (hit.num_tokens if hit else 0) + num_external_tokens
        total = self.slots.total(computed + num_new_tokens)
        if not self.admission.fits(key, total, hit, computed):
            return False
        sequence = self._begin(request, hit, computed, bool(num_external_tokens))
        sequence.num_external = computed if delay_publication else None
        sequence.room_end = self.tables.grow(key, total)
        self._launched(sequence, computed + num_new_tokens)
        return True

    def allocate_decodes(self, requests: Sequence[KVSequence]) -> int:
        """Give one slot each to sequences, in order, as ``allocate`` does.

        Returns:
            How many got theirs; the one after them lacks blocks.
        """
        sequences = self._sequences
        for number, request in enumerate(requests):
            sequence = sequences.get(request.key)
            if sequence is not None and sequence.num_scheduled < sequence.quiet_end:
                sequence.num_scheduled += 1
            elif not self.allocate(request, num_new_tokens=1):
                return number
        return len(requests)

    def reserve_external(
        self, request: KVSequence, num_external_tokens: int, num_new_tokens: int = 1
    ) -> ExternalReservation | None:
        """Take everything a decode worker needs for a prompt that is computed elsewhere.

        Full-attention groups hold their joint hit, whatever other groups have, and lack the
        rest. Other kinds take no hits: they lack all that a query at ``num_external_tokens``
        sees. Nothing is published before ``commit_external``; ``free`` gives all back.

        Returns:
            None if it does not fit now; nothing has changed then.
        """
        key, computed = request.key, num_external_tokens
        if key in self._sequences or key in self._promises:
            raise InvariantViolation(f"{key!r} exists already")
        total = self.slots.total(computed + num_new_tokens)
        hit = self._matcher.find_always_visible(request.hashes, computed)
        if not self.admission.fits(key, total, hit, computed):
            return None
        self._begin(request, hit, computed, True).num_external = computed
        self.tables.grow(key, total)
        return reservation_of(self.managers, key, hit, computed)

    def commit_external(self, key: Hashable) -> None:
        """The external tokens are valid now: publish their full blocks."""
        self.publish(key, sequence_of(self._sequences, key).commit_external())

    # -- after a step -------------------------------------------------------------------------

    def publish(self, key: Hashable, num_computed_tokens: int) -> None:
        """Make the full blocks of computed tokens findable, once their step has completed.

        Call it before the window moves past them. Blocks without a hash yet wait for the next
        call. A published block is never written again.
        """
        self.publish_step([(key, num_computed_tokens)])

    def publish_step(self, parts: Iterable[tuple[Hashable, int]]) -> None:
        """``publish`` for all (key, computed tokens) of a step that has completed."""
        sequences = self._sequences
        for key, num_computed_tokens in parts:
            sequence = sequences.get(key) or sequence_of(sequences, key)
            if num_computed_tokens > sequence.num_scheduled:
                raise InvariantViolation(f"{key!r} would publish tokens that were never scheduled")
            sequence.num_computed = num_computed_tokens
            if num_computed_tokens >= sequence.publish_from:
                self._publication.publish(sequence, num_computed_tokens)

    def release_out_of_window(self, key: Hashable, num_computed_tokens: int) -> None:
        """Drop the blocks that no query from ``num_computed_tokens`` on sees.

        No step in flight may compute an earlier one; cached blocks stay findable until evicted.
        """
        if sequence := self._sequences.get(key):
            self._publication.forget_skipped(sequence, num_computed_tokens)
        for manager in self.tables.moving:
            manager.drop_skipped(key, num_computed_tokens)
        if key in self._promises:
            self.admission.update(key)

    def free(self, key: Hashable) -> None:
        """End a sequence, its promise included; idempotent. Steps in flight keep its blocks."""
        self._promises.end(key)
        self.tables.free(key, self._steps.drop)
        self._steps.forget(key)
        self._sequences.pop(key, None)

    def hold_step(self, step_id: Hashable, keys: Iterable[Hashable]) -> None:
        """A step over these sequences is launched: it holds all their blocks."""
        self._steps.begin(step_id, keys)

    def release_step(self, step_id: Hashable) -> None:
        """The step has ended, with or without error; idempotent."""
        self._steps.end(step_id)

    def forget_prefixes(self) -> int:
        """Forget all cached contents, and publish nothing more of the sequences that have begun.

        What sequences and other holders hold they keep. Returns the blocks that were findable.
        """
        for sequence in self._sequences.values():
            sequence.request.publishes = False
            sequence.publish_from = NEVER
        return self.pool.clear_cache()

    # -- reading ------------------------------------------------------------------------------

    def num_scheduled_tokens(self, key: Hashable) -> int:
        """Tokens computed or in a launched step, external ones included."""
        return sequence_of(self._sequences, key).num_scheduled

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder."""
        return self.pool.num_free

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that nobody was promised (at least 0)."""
        return max(0, self.pool.num_free - self._promises.num_promised)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can ever be allocated."""
        return self.pool.num_usable

    def check(self) -> None:
        """Verify all invariants; raises InvariantViolation (linear in the pool)."""
        self.tables.check(self._sequences.keys())
        self.pool.check(self.tables.all_blocks())
        self._promises.check()

    # -- inside -------------------------------------------------------------------------------

    def _begin(
        self, request: KVSequence, hit: CacheHit | None, num_computed: int, external: bool
    ) -> SequenceState:
        """Start all tables: every group's hit is held before any group allocates."""
        self.tables.start(request.key, hit, num_computed, external=external)
        sequence = self._sequences[request.key] = SequenceState(request, num_computed, num_computed)
        self._publication.begin(sequence, hit)
        return sequence

    def _go_on(self, sequence: SequenceState, num_new_tokens: int) -> bool:
        """``allocate`` for a sequence that has begun."""
        key, computed = sequence.request.key, sequence.num_scheduled
        # What steps in flight see or have yet to publish stays.
        in_flight = self._steps.in_flight(key)
        self.release_out_of_window(key, sequence.num_computed if in_flight else computed)
        end = computed + num_new_tokens
        for total in (self.slots.total(end), end):  # drafts go without rather than wait for memory
            if total <= sequence.room_end:
                break
            if self.admission.fits(key, total, None, computed):
                sequence.room_end = self.tables.grow(key, total)
                break
        else:
            return False
        self._launched(sequence, end)
        return True

    def _launched(self, sequence: SequenceState, num_scheduled: int) -> None:
        key, sequence.num_scheduled = sequence.request.key, num_scheduled
        if sequence.num_external is None:
            room_end = min(sequence.room_end, self.max_model_tokens)
            if room_end < self.max_model_tokens:
                room_end -= self.num_lookahead_tokens
            sequence.quiet_end = self.tables.quiet_end(key, num_scheduled, room_end)
        if key in self._promises:
            self._promises.adopted(key)
            self.admission.update(key)
