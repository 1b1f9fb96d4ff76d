"""Linear states: whatever a token left behind is in the blocks of its sequence and nowhere else."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.sequence import KVSequence
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken
from disagg.scheduling.block_tables import SentTables
from disagg.scheduling.step import SequenceSlice, Step
from disagg.workers.engines.native.families import SUPPORTED
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint, reference_generate
from tests.tiny_families import FAMILIES
from tests.unit.workers.engines.native.sequences import Pool, run_one
from tests.unit.workers.engines.serving import GREEDY, core_over, serve

STATES = sorted(
    name for name, tiny in FAMILIES.items() if SUPPORTED[tiny.model.__name__].has_states
)
BLOCK = 4
PLENTY = 400
TOLERANCE = 1e-4
GAP_MIN = 1e-3
SAMPLING = replace(GREEDY, num_logprobs=1)
Reference = tuple[list[int], list[float]]


@pytest.fixture(scope="module", params=STATES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[tuple[NativeEngine, NativeEngine]]:
    """Two of one model, with pools of different sizes."""
    made = [NativeEngine(directory, num_blocks=n, block_tokens=BLOCK) for n in (PLENTY, PLENTY + 9)]
    yield made[0], made[1]
    for engine in made:
        engine.close()


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


def state_group(engine: NativeEngine) -> int:
    (group,) = (g.group for g in engine.layout.groups if isinstance(g.spec, LinearStateSpec))
    assert engine.layout.groups[group].blocks_per_state > 1
    return group


def is_as_expected(samples: Sequence[SampledToken | None], reference: Reference, at: int) -> bool:
    """Whether tokens, and logprobs to 1e-4, are the reference's from its token ``at`` on."""
    for number, sample in enumerate(samples, at):
        if sample is None or sample.logprobs is None or sample.token_id != reference[0][number]:
            return False
        if abs(sample.logprobs.logprob - reference[1][number]) > TOLERANCE:
            return False
    return True


def test_answers_under_the_production_scheduler(
    directory: Path, engines: tuple[NativeEngine, NativeEngine]
) -> None:
    """In odd chunks, beside each other, from hits, and preempted."""
    drawn = [clear_prompt(directory, length) for length in (1, 9, 39)]
    prompts, expected = [one for one, _ in drawn], [tokens for _, (tokens, _) in drawn]
    engine = engines[0]
    for max_step_tokens in (3, 64):
        engine.pool.poison(range(1, PLENTY))
        core = core_over(engine, max_step_tokens)
        for again in range(2):
            again_now = KVSequence("again", prompts[2])
            BlockHasher(b"key", BLOCK).extend(again_now.hashes, again_now.token_ids)
            hit = core.kv.find_longest_cache_hit(again_now, len(prompts[2]) - 1)
            # Chunks of 3 end at 12, 24 and 36; one chunk ends behind the last block end.
            assert bool(hit.num_tokens) is (again == 1 and max_step_tokens == 3)
            assert serve(core, engine, prompts) == expected
    # Two prompts fit, each of 10 blocks and 2 states; what they generate needs 3 blocks more.
    num_blocks = 22 + 4 * engine.layout.groups[state_group(engine)].blocks_per_state
    small = NativeEngine(directory, num_blocks=num_blocks, block_tokens=BLOCK)
    core = core_over(small, 64)
    assert serve(core, small, [prompts[2]] * 4) == [expected[2]] * 4
    assert core.batcher.num_preemptions > 0


FAULTS = ("none", "states stay behind", "states of nothing", "a state one token later")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_of_the_blocks_is_a_hand_over(
    directory: Path, engines: tuple[NativeEngine, NativeEngine], fault: str
) -> None:
    """Into other blocks of another engine's pool, mid-way and at the prompt's end."""
    one, other = engines
    prompt, expected = clear_prompt(directory, 37)
    for at in (0, 4):  # sampled tokens: after the prompt, and in the middle of decoding
        for engine in engines:
            engine.pool.poison(range(1, engine.pool.num_blocks))
        here = Runs(one, coordinator(one), prompt)
        samples = [here.step(num) for num in (5, 17, 15)] + [here.step(1) for _ in range(at)]
        num_known = here.computed
        assert is_as_expected(samples[2:], expected, 0)
        there = Runs(other, coordinator(other), here.sequence.token_ids)
        reserved = there.kv.reserve_external(there.sequence, num_known)
        assert reserved is not None
        blocks = here.kv.in_window_blocks(here.sequence.key, num_known)
        if fault == "a state one token later":
            here.step(1)
        for group, (mine, theirs) in enumerate(zip(blocks, reserved.lacks, strict=True)):
            assert [index for index, _ in mine] == [index for index, _ in theirs]
            for (_, source), (_, target) in zip(mine, theirs, strict=True):
                if group == state_group(one) and fault == "states stay behind":
                    continue
                other.pool.tensor[target] = one.pool.tensor[source]
                if group == state_group(one) and fault == "states of nothing":
                    other.pool.tensor[target] = 0
        there.kv.commit_external(there.sequence.key)
        there.computed = num_known
        if fault == "states stay behind":
            there.step(1, is_ok=False)
            continue
        rest = [there.step(1) for _ in range(GREEDY.max_tokens - at - 1)]
        assert is_as_expected(rest, expected, at + 1) is (fault == "none")


@pytest.mark.parametrize("at", [24, 20], ids=["right", "of another position"])
def test_a_hit_goes_on_from_a_snapshot(
    directory: Path, engines: tuple[NativeEngine, NativeEngine], at: int
) -> None:
    prompt, expected = clear_prompt(directory, 37)
    engine = engines[0]
    engine.pool.poison(range(1, PLENTY))
    kv, group = coordinator(engine), state_group(engine)
    first = Runs(engine, kv, prompt)
    snapshots = {}
    for num in (5, 15, 4, 2):  # ends at two block ends, 20 and 24, and beyond
        first.step(num)
        size = engine.layout.groups[group].blocks_per_state
        snapshots[first.computed] = kv.block_table(first.sequence.key)[group][-size:]
    kv.free(first.sequence.key)
    engine.pool.tensor[snapshots[24]] = engine.pool.tensor[snapshots[at]].clone()
    before = engine.pool.tensor[snapshots[24]].clone()
    again = Runs(engine, kv, prompt)
    assert again.start_from_hit() == 24
    samples = [again.step(13), *(again.step(1) for _ in range(GREEDY.max_tokens - 1))]
    assert is_as_expected(samples, expected, 0) is (at == 24)
    assert torch.equal(engine.pool.tensor[snapshots[24]], before)  # it stays for the next one


def test_a_step_writes_the_state_at_its_end_only(
    engines: tuple[NativeEngine, NativeEngine],
) -> None:
    engine = engines[0]
    pool = Pool(engine, random.Random(2))
    seq = pool.start("a", range(10, 60))
    assert run_one(engine, pool.slice(seq, 17)) == ""
    seq.computed = 17
    part = pool.slice(seq, 6)
    before = engine.pool.tensor.clone()
    assert run_one(engine, part) == ""
    changed = set((engine.pool.tensor != before).any(1).nonzero().flatten().tolist())
    written = {
        block
        for group, table in zip(engine.layout.groups, seq.tables, strict=True)
        for block in (
            table[-group.blocks_per_state :] if group.group == state_group(engine) else table[4:]
        )
    }
    assert changed == written
