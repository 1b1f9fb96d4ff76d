"""One sequence of the production coordinator, computed step by step on an engine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.sequence import KVSequence
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken
from disagg.scheduling.block_tables import SentTables
from disagg.scheduling.step import SequenceSlice, Step
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import reference_generate
from tests.unit.workers.engines.serving import GREEDY

TOLERANCE = 1e-4
GAP_MIN = 1e-3
SAMPLING = replace(GREEDY, num_logprobs=1)
Reference = tuple[list[int], list[float]]


def clear_prompt(directory: Path, length: int) -> tuple[list[int], Reference]:
    """A prompt after which the reference is sure of every token."""
    for seed in range(20):
        prompt = random.Random(seed).choices(range(7, 320), k=length)
        tokens, logprobs, min_gap = reference_generate(directory, prompt, GREEDY.max_tokens)
        if min_gap > GAP_MIN:
            return prompt, (tokens, logprobs)
    raise AssertionError(f"no clear prompt of {length} tokens")


class Runs:
    """One sequence of a coordinator, computed step by step on an engine."""

    def __init__(self, engine: NativeEngine, kv: KVCacheCoordinator, prompt: Sequence[int]) -> None:
        self.engine, self.kv = engine, kv
        self.hasher = BlockHasher(b"key", engine.layout.hash_block_tokens)
        self.sequence = KVSequence(RequestKey("r", 1), list(prompt))
        self.hasher.extend(self.sequence.hashes, self.sequence.token_ids)
        self.computed = 0
        self._sent: SentTables | None = None

    def step(self, num_tokens: int, *, is_ok: bool = True) -> SampledToken | None:
        """Compute so many tokens; appends what is sampled after the last one known."""
        key, start = self.sequence.key, self.computed
        assert isinstance(key, RequestKey)
        assert self.kv.allocate(self.sequence, num_new_tokens=num_tokens)
        is_new, self._sent = self._sent is None, self._sent or SentTables(self.kv, key)
        end = start + num_tokens
        part = SequenceSlice(
            key=key,
            token_ids=self.sequence.token_ids[start:end],
            start=start,
            is_new=is_new,
            table_changes=self._sent.take_changes(),
            sampling=SAMPLING if end == self.sequence.num_tokens else None,
        )
        self.kv.hold_step(end, [key])
        result = self.engine.run(Step(end, (part,)))
        self.kv.release_step(end)
        assert bool(result.error) is not is_ok, result.error
        if not is_ok:
            return None
        self.computed = end
        self.kv.publish(key, end)
        self.kv.release_out_of_window(key, end)
        (sample,) = result.samples
        if sample is not None:
            self.sequence.token_ids.append(sample.token_id)
            self.hasher.extend(self.sequence.hashes, self.sequence.token_ids)
        return sample

    def start_from_hit(self) -> int:
        """Adopt what the cache has."""
        hit = self.kv.find_longest_cache_hit(self.sequence, self.sequence.num_tokens - 1)
        assert self.kv.admit(self.sequence.key, self.sequence.num_tokens, hit)
        self.computed = hit.num_tokens
        return self.computed


def coordinator(engine: NativeEngine) -> KVCacheCoordinator:
    limit = engine.max_model_tokens
    return KVCacheCoordinator(
        engine.layout, engine.pool.num_blocks, max_model_tokens=limit, max_step_tokens=limit
    )


def is_as_expected(samples: Sequence[SampledToken | None], reference: Reference, at: int) -> bool:
    """Whether tokens, and logprobs to 1e-4, are the reference's from its token ``at`` on."""
    for number, sample in enumerate(samples, at):
        if sample is None or sample.logprobs is None or sample.token_id != reference[0][number]:
            return False
        if abs(sample.logprobs.logprob - reference[1][number]) > TOLERANCE:
            return False
    return True
