"""Sequences over an engine's pool with block tables kept by hand, as adversarial as allowed.

Blocks are scattered, every block that nobody holds is NaN, and blocks that left the window are
taken away before the next step.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.shapes.layout import KVCacheGroup
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.scheduling.step import SequenceSlice, Step, TableChange
from disagg.workers.engines.native.native_engine import NativeEngine

GREEDY = SamplingParams(max_tokens=1)


@dataclass(slots=True)
class TrackedSequence:
    """One request: its tokens so far and what of them is in the pool."""

    name: str
    tokens: list[int]
    num_prompt: int
    tables: list[list[int]]
    computed: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)
    """Per group the (skipped, all) entries of its table that the last slice told of."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """By position of the token that produced them."""


class Pool:
    """Free blocks of an engine, handed out in random order."""

    def __init__(self, engine: NativeEngine, rng: random.Random) -> None:
        self.engine = engine
        self.free = list(range(1, engine.pool.num_blocks))
        rng.shuffle(self.free)
        engine.pool.poison(self.free)

    def start(self, name: str, prompt: Sequence[int]) -> TrackedSequence:
        tables: list[list[int]] = [[] for _ in self.engine.layout.groups]
        return TrackedSequence(name, list(prompt), len(prompt), tables)

    def slice(
        self,
        seq: TrackedSequence,
        num_tokens: int,
        sampling: SamplingParams | None = GREEDY,
        *,
        anew: bool = True,
    ) -> SequenceSlice:
        """The next tokens of a sequence; allocates their blocks, drops those out of window.

        Args:
            seq: the sequence.
            num_tokens: how many.
            sampling: of the token that follows.
            anew: carry the whole tables; else what changed since the last slice, which must have
                been run.
        """
        end = seq.computed + num_tokens
        for group, table in zip(self.engine.layout.groups, seq.tables, strict=True):
            size = group.spec.block_tokens
            if isinstance(group.spec, LinearStateSpec):
                missing = -(-end // size) * group.blocks_per_state - len(table)
                if missing:
                    table += [NULL_BLOCK] * (missing - group.blocks_per_state)
                    table += [self.free.pop() for _ in range(group.blocks_per_state)]
                for position in range(seen(group, seq.computed)):
                    self._release(table, position)
                continue
            while len(table) * size < end:
                table.append(self.free.pop())
            for position in range((group.spec.first_seen(seq.computed) or 0) // size):
                self._release(table, position)
        return SequenceSlice(
            key=RequestKey(seq.name, 0),
            token_ids=seq.tokens[seq.computed : end],
            start=seq.computed,
            is_new=anew or not seq.sent,
            table_changes=self._changes(seq, anew=anew),
            sampling=sampling,
        )

    def _changes(self, seq: TrackedSequence, *, anew: bool) -> tuple[TableChange, ...]:
        before = [(0, 0)] * len(seq.tables) if anew or not seq.sent else seq.sent
        seq.sent = [(_num_skipped(table), len(table)) for table in seq.tables]
        if seq.sent == before:
            return ()
        return tuple(
            TableChange(skipped, tuple(table[num_sent:]))
            for table, (skipped, _), (_, num_sent) in zip(seq.tables, seq.sent, before, strict=True)
        )

    def finish(self, seq: TrackedSequence) -> None:
        for table in seq.tables:
            for position in range(len(table)):
                self._release(table, position)

    def _release(self, table: list[int], position: int) -> None:
        if table[position] != NULL_BLOCK:
            self.engine.pool.poison([table[position]])
            self.free.insert(0, table[position])
            table[position] = NULL_BLOCK


def seen(group: KVCacheGroup, computed: int) -> int:
    """Index in its table of a block with what the token after ``computed`` ones reads."""
    size = group.spec.block_tokens
    if isinstance(group.spec, LinearStateSpec):
        return max(computed - 1, 0) // size * group.blocks_per_state
    return max(computed - size, group.spec.first_seen(computed) or 0) // size


def _num_skipped(table: list[int]) -> int:
    return next((n for n, block in enumerate(table) if block != NULL_BLOCK), len(table))


def tables_of(part: SequenceSlice) -> list[list[int]]:
    """Per group the block table that a slice carries."""
    assert part.is_new
    return [list(change.new_blocks) for change in part.table_changes]


def with_tables(part: SequenceSlice, tables: Sequence[Sequence[int]]) -> SequenceSlice:
    """The slice with other tables."""
    changes = tuple(TableChange(0, tuple(table)) for table in tables)
    return replace(part, is_new=True, table_changes=changes)


@torch.inference_mode()
def forward_all(engine: NativeEngine, slices: Sequence[SequenceSlice]) -> list[torch.Tensor]:
    """Logits of every token of every slice, not of the sampled ones only."""
    batch = engine.lay_out(Step(0, tuple(slices)))
    rows = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    logits = engine.forward(replace(batch, sampled_rows=rows)).float().cpu()
    return list(torch.split(logits, [len(part.token_ids) for part in slices]))


def generate(
    engine: NativeEngine,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    rng: random.Random,
    chunk_tokens_max: int = 40,
    batch_max: int = 4,
) -> list[TrackedSequence]:
    """Continuous batching: random chunks of some sequences beside decode tokens of others.

    Every sequence ends with ``num_tokens`` greedy tokens, and with logits for every position but
    the last token's.
    """
    pool = Pool(engine, rng)
    waiting = [pool.start(f"s{i}", prompt) for i, prompt in enumerate(prompts)]
    running: list[TrackedSequence] = []
    done: list[TrackedSequence] = []
    while waiting or running:
        while waiting and len(running) < batch_max:
            running.append(waiting.pop(0))
        # Sometimes a sequence sits a step out, so that batches differ in every way.
        batch = [seq for seq in running if rng.random() < 0.85] or running[:1]
        rng.shuffle(batch)
        slices = [
            pool.slice(
                seq,
                min(len(seq.tokens) - seq.computed, rng.randint(1, chunk_tokens_max)),
                anew=rng.random() < 0.1,  # as after a preemption, but for its KV
            )
            for seq in batch
        ]
        for seq, part, logits in zip(batch, slices, forward_all(engine, slices), strict=True):
            seq.logits |= {part.start + i: row for i, row in enumerate(logits)}
            seq.computed += len(part.token_ids)
            if seq.computed == len(seq.tokens):
                seq.tokens.append(int(logits[-1].argmax()))
            if len(seq.tokens) == seq.num_prompt + num_tokens:
                running.remove(seq)
                done.append(seq)
                pool.finish(seq)
    return sorted(done, key=lambda seq: int(seq.name[1:]))


def run_one(engine: NativeEngine, part: SequenceSlice) -> str:
    """Run a step of one slice; returns its error."""
    return engine.run(Step(step_id=0, slices=(part,))).error
