"""A worker's memory written out position by position, to judge the coordinator by.

Memory maps block -> offset -> what was computed there, and what is computed at position p is the
prefix up to p itself; so a wrong, torn, stale or early read shows as a different prefix.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout

Value = tuple[int, int]
"""(group, hash of the prefix): what one position of one group holds."""


def visible(spec: Spec, position: int) -> range:
    """Earlier positions whose memory a query at ``position`` reads (for a state: the last)."""
    match spec:
        case SlidingWindowSpec():
            return range(max(0, position - spec.window_tokens + 1), position)
        case ChunkedLocalSpec():
            return range(position - position % spec.chunk_tokens, position)
        case LinearStateSpec():
            return range(max(0, position - 1), position)
        case CrossAttentionSpec():
            return range(spec.encoder_tokens)
        case _:
            return range(position)


def needed_blocks(spec: Spec, position: int) -> list[int]:
    """Indexes of the blocks that a query at ``position`` reads."""
    return sorted({place // spec.block_tokens for place in visible(spec, position)})


def longest_hit(kv: KVCacheCoordinator, request: KVSequence, max_tokens: int) -> int:
    """Brute force over all lengths: every group has all that the next query reads."""
    if any(isinstance(group.spec, CrossAttentionSpec) for group in kv.layout.groups):
        return 0  # tokens do not tell what the encoder was given
    size = kv.layout.hash_block_tokens
    aligned = max(group.spec.block_tokens for group in kv.layout.groups)
    for length in range(max_tokens - max_tokens % aligned, 0, -aligned):
        if length // size <= len(request.hashes) and all(
            request.hashes[(place + 1) * group.spec.block_tokens // size - 1]
            in kv.pool.cache.index(group.group)
            for group in kv.layout.groups
            for place in needed_blocks(group.spec, length)
        ):
            return length
    return 0


@dataclass
class Run:
    """One sequence's part of a step, as it was launched: the device sees this, nothing else."""

    key: int
    tokens: tuple[int, ...]
    start: int
    end: int
    tables: tuple[list[int], ...]


@dataclass
class Live:
    """A sequence; ``done`` tokens are computed, ``launched`` are computed or in a step.

    ``next_query`` is the earliest position that a step in flight or a later one computes.
    """

    request: KVSequence
    prompt_tokens: int
    done: int = 0
    launched: int = 0
    next_query: int = 0
    external: int | None = None
    promised: bool = False


STEPS_MAX = 4
"""Steps in flight at once."""


@dataclass
class World:
    """Coordinator, device memory and what is under way."""

    specs: Sequence[Spec]
    num_blocks: int
    chunk_tokens: int
    deduplicate: bool = True
    retention: Retention = field(default_factory=Retention)
    eviction: str = "lru"
    memory: dict[int, dict[int, Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = min(spec.block_tokens for spec in self.specs)
        groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(self.specs))
        layout = KVCacheLayout(groups, max(spec.page_bytes for spec in self.specs), size)
        has_states = any(isinstance(spec, LinearStateSpec) for spec in self.specs)
        self.drafts = 0 if has_states else self.num_blocks % 4
        self.kv = KVCacheCoordinator(
            layout,
            self.num_blocks,
            num_lookahead_tokens=self.drafts,
            max_model_tokens=10_000,
            max_step_tokens=STEPS_MAX * self.chunk_tokens,
            steps_max=STEPS_MAX,
            policy=CachePolicy(
                retention=self.retention,
                deduplicate=self.deduplicate,
                eviction=self.eviction,
                observe_every=2,
            ),
        )
        self.hasher = BlockHasher(b"world", size)

    def write(self, group: int, block: int, tokens: Sequence[int], position: int) -> None:
        """The device stores what it computed at ``position``."""
        assert block != NULL_BLOCK, f"group {group} writes position {position} to the null block"
        assert self.kv.pool.num_holds(block), f"block {block} is written without a holder"
        assert not self.kv.pool.cache.has(block), f"block {block} is written after publication"
        offset = position % self.specs[group].block_tokens
        if isinstance(self.specs[group], LinearStateSpec):
            offset = 0
        self.memory.setdefault(block, {})[offset] = self.content(group, tokens, position)

    def content(self, group: int, tokens: Sequence[int], position: int) -> Value:
        """What belongs at a position: its prefix, or an encoder output of this request."""
        if isinstance(self.specs[group], CrossAttentionSpec):
            return group, hash(("encoder", tokens[0], position))
        return group, hash(tuple(tokens[: position + 1]))

    def read(
        self, group: int, table: Sequence[int], tokens: Sequence[int], positions: Iterable[int]
    ) -> None:
        """A query reads these positions: all must be there and right."""
        size = self.specs[group].block_tokens
        for position in positions:
            block = table[position // size]
            assert block != NULL_BLOCK, f"group {group} lacks position {position}"
            offset = 0 if isinstance(self.specs[group], LinearStateSpec) else position % size
            found = self.memory.get(block, {}).get(offset)
            assert found == self.content(group, tokens, position), (
                f"group {group} position {position}: block {block} holds something else"
            )

    def execute(self, run: Run, alive: bool) -> None:
        """The device runs one sequence's part of a step; for an ended one it writes garbage."""
        tokens = run.tokens if alive else [-1] * run.end
        for group, spec in enumerate(self.specs):
            table = run.tables[group]
            if isinstance(spec, LinearStateSpec):
                if alive:
                    self.read(group, table, tokens, visible(spec, run.start))
                self.write(
                    group, table[(run.end - 1) // spec.block_tokens], run.tokens, run.end - 1
                )
                continue
            if isinstance(spec, CrossAttentionSpec):
                if run.start == 0:
                    for position in range(spec.encoder_tokens):
                        self.write(group, table[position // spec.block_tokens], tokens, position)
                elif alive:
                    self.read(group, table, tokens, visible(spec, run.start))
                continue
            for position in range(run.start, run.end) if alive else ():
                early = [place for place in visible(spec, position) if place < run.start]
                self.read(group, table, tokens, early)
            for position in range(run.start, run.end):
                self.write(group, table[position // spec.block_tokens], tokens, position)

    def check_table(self, live: Live, num_steps: int) -> None:
        """Blocks held are exactly those from the first needed one up to the last slot."""
        key = live.request.key
        for group, (spec, table) in enumerate(
            zip(self.specs, self.kv.tables.blocks(key), strict=True)
        ):
            held = [place for place, block in enumerate(table) if block != NULL_BLOCK]
            if not isinstance(spec, CrossAttentionSpec):
                slots = len(table) * spec.block_tokens
                assert slots >= live.launched, f"group {group} of {key} lacks slots"
            must = needed_blocks(spec, live.next_query)
            assert set(must) <= set(held), f"group {group} of {key} gave up a block it needs"
            if isinstance(spec, LinearStateSpec):
                assert len(held) <= 2 + num_steps
            elif held:
                assert held == list(range(held[0], len(table)))


def settings_of(max_examples: int) -> settings:
    """No shrinking: a failure prints its steps and the blob that replays it."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        print_blob=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
