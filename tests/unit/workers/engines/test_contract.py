"""What every engine must do, driven by the production scheduler; see workers/engines/README.md."""

import ctypes
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from disagg.messages.identity import RequestKey
from disagg.scheduling.step import SequenceSlice, Step, TableChange
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.protocol import Engine
from tests.checkpoints import make_checkpoint
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.engines.serving import GREEDY, core_over, serve

PROMPTS = [[(7 * n + 3 * i) % 89 + 7 for i in range(length)] for n, length in enumerate((1, 9, 40))]
PLENTY = 200
Make = Callable[[int], Engine]


@pytest.fixture(scope="module", params=["torch", "digest"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Engines of one model, by the number of blocks."""
    if request.param == "digest":
        return DigestEngine
    directory: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3", window=8)
    return lambda num_blocks: NativeEngine(directory, num_blocks=num_blocks, block_tokens=4)


def test_what_is_declared(make: Make) -> None:
    one, other = make(8), make(9)
    assert one.fingerprint == other.fingerprint != ""
    assert one.layout == other.layout
    assert one.max_model_tokens > 0
    assert (one.region.num_blocks, other.region.num_blocks) == (8, 9)
    assert one.region.block_bytes == one.layout.block_bytes
    assert one.region.address != other.region.address


def test_tokens_depend_on_the_prompt_alone(make: Make) -> None:
    """Not on chunks, neighbours, hits in the cache, blocks that were others', preemption."""
    engine = make(PLENTY)
    expected = [serve(core_over(engine, 64), engine, [one])[0] for one in PROMPTS]
    assert all(len(tokens) == GREEDY.max_tokens for tokens in expected)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)  # control
    for max_step_tokens in (3, 64):
        engine = make(PLENTY)
        core = core_over(engine, max_step_tokens)
        for _ in range(3):
            assert serve(core, engine, PROMPTS) == expected
    num_preemptions = 0
    for per_group in (8, 10, 12):  # memory for some of the prompts, not for their answers
        engine = make(per_group * len(engine.layout.groups) + 1)
        core = core_over(engine, 64)
        assert serve(core, engine, [PROMPTS[1]] * 4) == [expected[1]] * 4
        num_preemptions += core.batcher.num_preemptions
    assert num_preemptions > 0


def part_of(name: str, tokens: list[int], start: int, tables: list[list[int]]) -> SequenceSlice:
    changes = tuple(TableChange(0, tuple(table)) for table in tables)
    return SequenceSlice(RequestKey(name, 1), tokens, start, True, changes, GREEDY)


def tables_over(engine: Engine, blocks: list[int], num_tokens: int) -> list[list[int]]:
    return [
        [blocks.pop() for _ in range(-(-num_tokens // group.spec.block_tokens))]
        for group in engine.layout.groups
    ]


def token_of(engine: Engine, part: SequenceSlice) -> int:
    result = engine.run(Step(1, (part,)))
    assert result.error == ""
    (sample,) = result.samples
    assert sample is not None
    return sample.token_id


@pytest.mark.parametrize("spoiled", [False, True])
def test_kv_is_what_the_region_holds(make: Make, *, spoiled: bool) -> None:
    """Blocks copied to other places of another engine's region: it goes on as the first one."""
    prompt, rng = PROMPTS[2], random.Random(1)
    one, other = make(PLENTY), make(PLENTY + 10)
    free = {engine: list(range(1, engine.region.num_blocks)) for engine in (one, other)}
    for blocks in free.values():
        rng.shuffle(blocks)
    here = tables_over(one, free[one], len(prompt) + 1)
    there = tables_over(other, free[other], len(prompt) + 1)
    first = token_of(one, part_of("r", prompt, 0, here))
    size = one.region.block_bytes
    for source, destination in zip(chain(*here), chain(*there), strict=True):
        if spoiled:
            source = 0  # the null block's bytes
        ctypes.memmove(
            other.region.address + destination * size, one.region.address + source * size, size
        )
    part = part_of("r", [first], len(prompt), there)
    if spoiled:
        assert other.run(Step(1, (part,))).error
    else:
        assert token_of(other, part) == token_of(one, part_of("again", [first], len(prompt), here))


def test_a_step_that_cannot_be_computed_is_an_error_and_no_more(make: Make) -> None:
    engine = make(PLENTY)
    free = list(range(1, PLENTY))
    good = part_of("good", PROMPTS[1], 0, tables_over(engine, free, 9))
    token = token_of(engine, good)
    known = replace(good, is_new=False, table_changes=())
    bad = {
        "null": part_of("null", [9], 8, [[0, 0, 0] for _ in engine.layout.groups]),
        "no table": replace(known, key=RequestKey("unknown", 1)),
        "a short table": part_of("short", PROMPTS[1], 0, [[1] for _ in engine.layout.groups]),
    }
    for number, (name, part) in enumerate(bad.items()):
        result = engine.run(Step(number, (part,)))
        assert result.error, name
        assert (result.step_id, result.samples) == (number, ())
        assert token_of(engine, known) == token


def test_a_sequence_that_ended_is_forgotten(make: Make) -> None:
    engine = make(PLENTY)
    part = part_of("r", PROMPTS[1], 0, tables_over(engine, list(range(1, PLENTY)), 9))
    token = token_of(engine, part)
    known = replace(part, is_new=False, table_changes=())
    assert token_of(engine, known) == token
    other = part_of("other", PROMPTS[0], 0, tables_over(engine, list(range(1, 20)), 1))
    assert engine.run(Step(2, (other,), ended=(part.key,))).error == ""
    assert engine.run(Step(3, (known,))).error
    assert token_of(engine, part) == token
