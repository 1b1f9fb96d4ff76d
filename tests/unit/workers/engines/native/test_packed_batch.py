"""What a step may not ask for is refused before anything is written."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disagg.scheduling.step import SequenceSlice, Step
from disagg.workers.engines.native import packed_batch
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint
from tests.unit.workers.engines.native.sequences import Pool, tables_of, with_tables


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("model"), "gemma3", max_position_embeddings=128
    )
    return NativeEngine(directory, num_blocks=64)


def _table(part: SequenceSlice, group: int, change: Callable[[list[int]], None]) -> SequenceSlice:
    tables = tables_of(part)
    change(tables[group])
    return with_tables(part, tables)


def _set(position: int, block: int) -> Callable[[list[int]], None]:
    def change(table: list[int]) -> None:
        table[position] = block

    return change


CHANGES: dict[str, tuple[Callable[[SequenceSlice], SequenceSlice], str]] = {
    "no tokens": (lambda part: replace(part, token_ids=()), "positions"),
    "before 0": (lambda part: replace(part, start=-1), "positions"),
    "beyond the model": (lambda part: replace(part, start=120), "positions"),
    "unknown token": (lambda part: replace(part, token_ids=(5, 320)), "token id"),
    "negative token": (lambda part: replace(part, token_ids=(-2,)), "token id"),
    "a table too few": (
        lambda part: with_tables(part, tables_of(part)[:-1]),
        "block tables",
    ),
    "a short table": (lambda part: _table(part, 0, list.clear), "ends before"),
    "null": (lambda part: _table(part, 1, _set(0, 0)), "null block"),
    "beyond the pool": (lambda part: _table(part, 1, _set(1, 64)), "block id"),
    "negative block": (lambda part: _table(part, 1, _set(1, -1)), "block id"),
    "one block in two groups": (
        lambda part: _table(part, 1, _set(1, tables_of(part)[0][1])),
        "one slot",
    ),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_bad_slice_is_an_error_that_changes_nothing(engine: NativeEngine, name: str) -> None:
    change, message = CHANGES[name]
    part = Pool(engine, random.Random(1)).start("a", range(10, 30))
    good = Pool(engine, random.Random(1)).slice(part, 20)
    assert engine.run(Step(1, (good,))).error == ""
    before = engine.pool.tensor.clone()
    result = engine.run(Step(2, (change(good),)))
    assert message in result.error
    assert result.step_id == 2
    assert result.samples == ()
    assert torch.equal(engine.pool.tensor, before)


def test_one_bad_slice_fails_the_step(engine: NativeEngine) -> None:
    pool = Pool(engine, random.Random(1))
    good = pool.slice(pool.start("a", range(10, 30)), 20)
    bad = replace(pool.slice(pool.start("b", range(10, 30)), 20), start=-5)
    assert engine.run(Step(3, (good, bad))).samples == ()
    assert "one slot" in engine.run(Step(3, (good, good))).error
    assert "without slices" in engine.run(Step(3, ())).error


def test_a_step_writes_its_own_slots_only(engine: NativeEngine) -> None:
    pool = Pool(engine, random.Random(2))
    seq = pool.start("a", range(10, 60))
    assert engine.run(Step(1, (pool.slice(seq, 40),))).error == ""
    seq.computed = 40
    part = pool.slice(seq, 3)
    before = engine.pool.tensor.clone()
    assert engine.run(Step(2, (part,))).error == ""
    changed = (engine.pool.tensor != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == {table[2] for table in seq.tables}
    for layer in engine.pool.layers.values():
        block = seq.tables[layer.group][2]
        assert not bool(layer.keys[block, :, 8:11].isnan().any())
        assert bool(layer.keys[block, :, 11:].isnan().all())


@pytest.mark.parametrize(("num_slots", "sizes"), [(1, [1, 1, 1, 1, 1]), (160, [2, 2, 1])])
def test_decodes_attend_in_tiles(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, num_slots: int, sizes: list[int]
) -> None:
    """Five sequences of two blocks of 16 tokens and two KV heads: 64 slots each."""
    pool = Pool(engine, random.Random(1))
    seqs = [pool.start(str(number), range(10 + number, 31 + number)) for number in range(5)]
    for seq in seqs:
        assert engine.run(Step(1, (pool.slice(seq, 20),))).error == ""
        seq.computed = 20
    parts = tuple(pool.slice(seq, 1) for seq in seqs)
    whole = engine.lay_out(Step(2, parts))
    assert [len(bucket.rows) for bucket in whole.groups[0].decodes] == [5]  # control
    with torch.inference_mode():
        expected = engine.forward(whole)
    monkeypatch.setattr(packed_batch, "DECODE_TILE_SLOTS", num_slots)
    tiled = engine.lay_out(Step(3, parts))
    for group in tiled.groups.values():
        assert [len(bucket.rows) for bucket in group.decodes] == sizes
    with torch.inference_mode():
        logits = engine.forward(tiled)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for seq in seqs:
        pool.finish(seq)


def test_a_closed_engine_fails_its_steps(tmp_path: Path) -> None:
    engine = NativeEngine(make_checkpoint(tmp_path, "qwen3"), num_blocks=8)
    pool = Pool(engine, random.Random(1))
    part = pool.slice(pool.start("a", range(10, 30)), 20)
    assert engine.run(Step(1, (part,))).error == ""
    engine.close()
    assert "closed" in engine.run(Step(2, (part,))).error
