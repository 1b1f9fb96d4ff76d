"""Packed, paged and chunked equals the plain transformers forward, for every claimed family."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from disagg.scheduling.step import SequenceSlice, Step
from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.families import SUPPORTED
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint, reference_generate, reference_logits
from tests.tiny_families import FAMILIES
from tests.unit.workers.engines.native.sequences import (
    GREEDY,
    Pool,
    TrackedSequence,
    forward_all,
    generate,
    run_one,
    seen,
    tables_of,
    with_tables,
)

WINDOW = 32
TOLERANCE = 1e-4
GAP_MIN = 1e-3
PROMPT_LENGTHS = (1, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 7 * WINDOW + 3)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, window=WINDOW)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[NativeEngine]:
    engine = NativeEngine(directory, num_blocks=600)
    yield engine
    engine.close()


def prompts(seed: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(7, 320) for _ in range(length)] for length in lengths]


def largest_difference(directory: Path, seq: TrackedSequence) -> float:
    expected = reference_logits(directory, seq.tokens[:-1])
    actual = torch.stack([seq.logits[position] for position in range(len(seq.tokens) - 1)])
    return float((expected - actual).abs().max())


def test_every_supported_family_is_tested() -> None:
    assert {family.name for family in SUPPORTED.values()} == set(FAMILIES) - {"qwen3_window"}
    assert set(SUPPORTED) == {tiny.model.__name__ for tiny in FAMILIES.values()}


@pytest.mark.parametrize("seed", [3, 11])
def test_packed_chunks_equal_the_plain_forward(
    directory: Path, engine: NativeEngine, seed: int
) -> None:
    print(f"seed {seed}")
    for seq in generate(engine, prompts(seed), num_tokens=12, rng=random.Random(seed)):
        assert largest_difference(directory, seq) < TOLERANCE
        logits = reference_logits(directory, seq.tokens[:-1])[seq.num_prompt - 1 :]
        best = logits.topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > GAP_MIN  # no tie decides
        assert int(clear.sum()) >= len(clear) - 1
        assert bool((best.indices[:, 0] == torch.tensor(seq.tokens[seq.num_prompt :]))[clear].all())


@pytest.mark.parametrize("block_tokens", [4, 8, 32])
def test_block_size_does_not_matter(directory: Path, block_tokens: int) -> None:
    engine = NativeEngine(directory, num_blocks=800, block_tokens=block_tokens)
    for seq in generate(
        engine, prompts(3, (3, WINDOW + 1, 100)), num_tokens=6, rng=random.Random(3)
    ):
        assert largest_difference(directory, seq) < TOLERANCE


def test_long_chunk_is_tiled(directory: Path, engine: NativeEngine) -> None:
    (prompt,) = prompts(4, (1300,))
    pool = Pool(engine, random.Random(4))
    seq = pool.start("long", prompt)
    (logits,) = forward_all(engine, [pool.slice(seq, len(prompt))])
    assert float((logits - reference_logits(directory, prompt)).abs().max()) < TOLERANCE


def test_run_samples_the_reference_tokens(directory: Path, engine: NativeEngine) -> None:
    (prompt,) = prompts(5, (50,))
    tokens, logprobs, min_gap = reference_generate(directory, prompt, 8)
    assert min_gap > GAP_MIN
    assert len(set(tokens)) > 3
    pool = Pool(engine, random.Random(5))
    seq = pool.start("run", prompt)
    sampling = replace(GREEDY, num_logprobs=2)
    for number, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        left = len(seq.tokens) - seq.computed
        if number == 0:  # a chunk that samples nothing, then the rest of the prompt
            result = engine.run(Step(0, (pool.slice(seq, 20, None),)))
            assert result.samples == (None,)
            seq.computed, left = 20, left - 20
        result = engine.run(Step(number, (pool.slice(seq, left, sampling),)))
        assert result.error == ""
        (sample,) = result.samples
        assert sample is not None
        assert sample.token_id == token
        assert sample.logprobs is not None
        assert sample.logprobs.logprob == pytest.approx(logprob, abs=1e-4)
        assert next(best for best, _ in sample.logprobs.top) == token
        seq.computed += left
        seq.tokens.append(token)


def test_read_through_a_null_entry_is_an_error(engine: NativeEngine) -> None:
    (prompt,) = prompts(6, (50,))
    pool = Pool(engine, random.Random(6))
    seq = pool.start("null", prompt)
    assert run_one(engine, pool.slice(seq, 49)) == ""
    seq.computed = 49
    part = pool.slice(seq, 1)
    assert run_one(engine, part) == ""
    for group in engine.layout.groups:
        tables = tables_of(part)
        tables[group.group][seen(group, 49)] = 0  # in the window and in the chunk of position 49
        assert "null block" in run_one(engine, with_tables(part, tables))


def test_an_unwritten_block_fails_the_step(engine: NativeEngine) -> None:
    """Control: the NaN that stands in free blocks is seen, even where nothing is sampled."""
    (prompt,) = prompts(7, (64,))
    pool = Pool(engine, random.Random(7))
    seq = pool.start("poison", prompt)
    assert run_one(engine, pool.slice(seq, 40)) == ""
    seq.computed = 40
    assert run_one(engine, pool.slice(seq, 24, None)) == ""
    seq.computed = 56
    engine.pool.poison([seq.tables[-1][seen(engine.layout.groups[-1], 56)]])
    assert "NonFiniteError" in run_one(engine, pool.slice(seq, 8, None))


@pytest.mark.parametrize("num_tokens", [1, 24])
def test_who_reads_poison_fails_alone(engine: NativeEngine, num_tokens: int) -> None:
    """Whoever is in its step gets the token that it gets alone."""

    def next_slices() -> list[SequenceSlice]:
        pool, slices = Pool(engine, random.Random(9)), []
        for name, prompt in zip(("one", "bad", "two"), prompts(9, (40, 64, 33)), strict=True):
            seq = pool.start(name, prompt)
            num_left = num_tokens if name == "bad" else 1
            assert run_one(engine, pool.slice(seq, len(prompt) - num_left)) == ""
            seq.computed = len(prompt) - num_left
            if name == "bad":
                last = seq.tables[-1][seen(engine.layout.groups[-1], seq.computed)]
                engine.pool.poison([last])
            slices.append(pool.slice(seq, num_left))
        return slices

    one, _, two = next_slices()
    alone = [engine.run(Step(0, (part,))).samples[0] for part in (one, two)]
    result = engine.run(Step(0, tuple(next_slices())))  # anew: steps change states in their place
    assert result.error == ""
    assert [bool(error) for error in result.errors] == [False, True, False]
    assert result.samples[1] is None
    for together, expected in zip(result.samples[::2], alone, strict=True):
        assert together is not None
        assert expected is not None
        assert together.token_id == expected.token_id


def test_a_corrupted_block_is_detected(directory: Path, engine: NativeEngine) -> None:
    """Control: the comparison sees one changed block of any one group."""
    (prompt,) = prompts(8, (48,))
    expected = reference_logits(directory, prompt)
    for group, corrupted in product(engine.layout.groups, (False, True)):
        pool = Pool(engine, random.Random(8))
        seq = pool.start("corrupt", prompt)
        forward_all(engine, [pool.slice(seq, 40)])
        seq.computed = 40
        if corrupted:
            block = seq.tables[group.group][seen(group, 40)]
            engine.pool.tensor[block].view(torch.float32).mul_(1.01)
        (logits,) = forward_all(engine, [pool.slice(seq, 8)])
        difference = float((logits - expected[40:]).abs().max())
        assert difference > 10 * TOLERANCE if corrupted else difference < TOLERANCE


def test_a_window_off_by_one_is_detected(directory: Path, tmp_path: Path) -> None:
    """Control: the comparison sees a window or chunk that is one token too long or too short."""
    checkpoint = open_checkpoint(directory)
    specs = checkpoint.layer_specs(block_tokens=16, dtype_bytes=4)
    if not any(spec and spec.window_tokens for spec in specs):
        pytest.skip("a family without windows")
    family = "qwen3_window" if checkpoint.family.name == "qwen3" else checkpoint.family.name
    for window in (WINDOW - 1, WINDOW + 1):
        other = NativeEngine(
            make_checkpoint(tmp_path / str(window), family, window=window), num_blocks=100
        )
        (seq,) = generate(other, prompts(9, (100,)), num_tokens=2, rng=random.Random(9))
        assert largest_difference(directory, seq) > 10 * TOLERANCE
