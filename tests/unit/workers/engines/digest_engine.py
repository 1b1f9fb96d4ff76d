"""A third engine: as little as one can be, with KV that are bytes in a region."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.forms import Section
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.engine_steps import EngineSteps, Scored, SliceSamples
from disagg.scheduling.step import SequenceSlice, Step, StepResult
from disagg.testing.simulation.symbolic_kinds import digest_of
from disagg.workers.engines.forms import group_forms
from disagg.workers.engines.protocol import Drafts
from disagg.workers.pool_region import PoolRegion
from disagg.workers.rank_agent import RankAgent
from disagg.workers.rank_connections import RankAddress, accept_ranks
from disagg.workers.ranked_checksums import RankChecksums
from disagg.workers.tiers.rank_tiers import RankTiers

BLOCK_TOKENS = 4
VOCAB_SIZE = 997
UNWRITTEN = -1
_never_freed: list[object] = []  # as of every pool: a peer may read it as long as the process lives


class DigestPool:
    """The memory of several ranks in one process; see `RankedPool`."""

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        self.regions = regions
        self.num_blocks, self.num_ranks = regions[0].num_blocks, len(regions)

    def connect(self, agent_name: str, handle_bytes_max: int) -> "list[Connection[Any, Any]]":
        def start(address: RankAddress) -> None:
            self.agents = [
                RankAgent(agent_name, rank, region, handle_bytes_max, address)
                for rank, region in enumerate(self.regions)
            ]

        return accept_ranks(self.num_ranks, "127.0.0.1", start)

    def connect_checksums(self) -> "list[Connection[Any, Any]]":
        def start(address: RankAddress) -> None:
            for rank, region in enumerate(self.regions):
                RankChecksums(rank, region, address)

        return accept_ranks(self.num_ranks, "127.0.0.1", start)

    def connect_tiers(self) -> "list[Connection[Any, Any]]":
        def start(address: RankAddress) -> None:
            for rank, region in enumerate(self.regions):
                RankTiers(rank, region, address)

        return accept_ranks(self.num_ranks, "127.0.0.1", start)


class DigestEngine:
    """A token's KV in a group is a digest of all that it was computed from; see `Engine`.

    Every head has one more than the head before it.
    """

    fingerprint = "digest"
    dtype = "none"
    page_format = "digests"
    summary = "nothing of this machine"
    drafts = Drafts()
    max_model_tokens = 512

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = BLOCK_TOKENS,
        num_heads: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self._block_tokens = block_tokens
        self._heads_per_rank = heads = num_heads // num_ranks
        shape = {
            "block_tokens": block_tokens,
            "num_kv_heads": heads,
            "head_size": 1,
            "dtype_bytes": 4,
        }
        self.layout = plan_layout(
            [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, window_tokens=6)]
        )
        section = Section("digests", 0, num_heads, heads, block_tokens * 8, 8, 8)
        self.forms = group_forms(self.layout, lambda group: (section,))
        size = self.layout.block_bytes
        self._ranks = [np.full((num_blocks, size // 8), UNWRITTEN) for _ in range(num_ranks)]
        _never_freed.extend(self._ranks)
        regions = [
            PoolRegion(
                address=cells.ctypes.data,
                num_blocks=num_blocks,
                block_bytes=size,
                memory_kind="DRAM",
                device_id=0,
                owner=cells,
            )
            for cells in self._ranks
        ]
        self.region: PoolRegion | DigestPool = regions[0] if num_ranks == 1 else DigestPool(regions)
        self._steps = EngineSteps(self._lay_out, self._compute, (LookupError, ValueError))
        self._tables = BlockTables(len(self.layout.groups), num_blocks)

    def prepare(self, step: Step) -> None:
        self._steps.prepare(step)

    def run(self, step: Step) -> StepResult:
        return self._steps.run(step)

    def _lay_out(self, step: Step) -> None:
        """Nothing: its tables are kept in the order of computing."""

    def _compute(self, _: None, step: Step) -> list[SliceSamples]:
        self._tables.apply(step)
        return [self._run(part) for part in step.slices]

    def _run(self, part: SequenceSlice) -> SliceSamples:
        sampled, scores = [], []
        for position, token in enumerate(part.token_ids, part.start):
            seen = tuple(sum(self._seen(part, group, position)) for group in (0, 1))
            digest = digest_of(token, seen)
            sampled.append(SampledToken(digest % VOCAB_SIZE))
            if position - part.start < len(part.scored_token_ids):
                scores.append(TokenLogprobs(-float(digest % VOCAB_SIZE)))
            for group in (0, 1):
                self._write(self._place(part, group, position), digest)
        if scores:
            return Scored(sampled[-1] if part.sampling else None, tuple(scores))
        if part.sampling is None:
            return None
        return tuple(sampled[-1 - part.num_drafts :]) if part.num_drafts else sampled[-1]

    def _seen(self, part: SequenceSlice, group: int, position: int) -> Iterator[int]:
        first = self.layout.groups[group].spec.first_seen(position)
        assert first is not None
        for at in range(first, position):
            yield self._read(self._place(part, group, at), f"group {group} position {at}")

    def _write(self, place: tuple[int, int], digest: int) -> None:
        for head, (cells, at) in enumerate(self._heads_at(place)):
            cells[at] = digest + head

    def _read(self, place: tuple[int, int], where: str) -> int:
        found = {int(cells[at]) - head for head, (cells, at) in enumerate(self._heads_at(place))}
        if len(found) > 1 or UNWRITTEN in found:
            raise ValueError(f"{where} has nothing, or heads of several tokens")
        return found.pop()

    def _heads_at(
        self, place: tuple[int, int]
    ) -> Iterator[tuple[npt.NDArray[Any], tuple[int, int]]]:
        """Every head of a token: the rank's memory, and where in it."""
        block, offset = place
        for cells in self._ranks:
            for head in range(self._heads_per_rank):
                yield cells, (block, head * self._block_tokens + offset)

    def _place(self, part: SequenceSlice, group: int, position: int) -> tuple[int, int]:
        block_index, offset = divmod(position, self._block_tokens)
        block = self._tables[part.key][group][block_index]
        if block == NULL_BLOCK:
            raise ValueError(f"group {group} is null at position {position}")
        return block, offset
