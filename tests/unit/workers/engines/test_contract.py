"""What every engine must do, driven by the production scheduler; see workers/engines/README.md."""

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams, TokenLogprobs
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step, TableChange
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.protocol import Engine
from disagg.workers.pool_region import PoolRegion
from tests.checkpoints import make_checkpoint
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.engines.serving import GREEDY, core_over, serve
from tests.vllm.engines import VLLM_SHAPE, make_vllm

SAMPLED = SamplingParams(
    max_tokens=10,
    temperature=1.0,
    top_p=0.95,
    seed=3,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((9, 1.0),),
)
PLENTY = 200


@dataclass(frozen=True)
class Kind:
    """Engines of one model.

    Attributes:
        make: an engine, by its number of blocks.
        lengths: of the prompts: one token, an answer that needs one more block, many blocks.
        scarce: blocks per group that hold some of four prompts of the second length, and not
            their answers.
    """

    make: Callable[[int], Engine]
    lengths: tuple[int, int, int]
    scarce: tuple[int, ...]
    scale: int = 1

    @property
    def prompts(self) -> list[list[int]]:
        """The same ones each time."""
        return [
            [(7 * n + 3 * i) % 89 + 7 for i in range(length)]
            for n, length in enumerate(self.lengths)
        ]


@pytest.fixture(
    scope="module", params=["torch", "digest", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    if request.param == "digest":
        return Kind(DigestEngine, (1, 9, 40), (8, 10, 12))
    folder = tmp_path_factory.mktemp("model")
    if request.param == "vllm":
        make_checkpoint(folder, "gemma3", window=40, **VLLM_SHAPE)
        return Kind(partial(make_vllm, folder), (1, 61, 300), (6, 8, 10), scale=8)
    make_checkpoint(folder, "gemma3", window=8)
    return Kind(partial(make_native, folder), (1, 9, 40), (8, 10, 12))


def make_native(directory: Path, num_blocks: int) -> Engine:
    return NativeEngine(directory, num_blocks=num_blocks, block_tokens=4)


def test_what_is_declared(kind: Kind) -> None:
    one, other = kind.make(8), kind.make(9)
    assert isinstance(one.region, PoolRegion)
    assert isinstance(other.region, PoolRegion)
    assert one.fingerprint == other.fingerprint != ""
    assert one.layout == other.layout
    assert one.max_model_tokens > 0
    assert (one.region.num_blocks, other.region.num_blocks) == (8, 9)
    assert one.region.block_bytes == one.layout.block_bytes
    assert one.region.address != other.region.address


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_depend_on_the_prompt_alone(kind: Kind, sampling: SamplingParams) -> None:
    """Not on chunks, neighbours, hits in the cache, blocks that were others', preemption."""
    engine = kind.make(PLENTY)
    prompts = kind.prompts
    expected = [serve(core_over(engine, 64), engine, [one], sampling)[0] for one in prompts]
    assert all(len(tokens) == sampling.max_tokens for tokens in expected)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)  # control
    for max_step_tokens in (3 * kind.scale, 64 * kind.scale):
        engine = kind.make(PLENTY)
        core = core_over(engine, max_step_tokens)
        for _ in range(3):
            assert serve(core, engine, prompts, sampling) == expected
    num_preemptions = 0
    for per_group in kind.scarce:
        engine = kind.make(per_group * len(engine.layout.groups) + 1)
        core = core_over(engine, 64)
        assert serve(core, engine, [prompts[1]] * 4, sampling) == [expected[1]] * 4
        num_preemptions += core.batcher.num_preemptions
    assert num_preemptions > 0


def test_a_prompt_is_scored_in_whatever_chunks_it_comes(kind: Kind) -> None:
    """And what is cached is no excuse; the answer is what it is without that."""
    scored = replace(GREEDY, num_prompt_logprobs=2)
    expected: list[list[TokenLogprobs]] = []
    for steps_max, max_step_tokens in ((1, 64), (1, 3), (2, 3), (2, 64)):
        engine = kind.make(PLENTY)
        core = core_over(engine, max_step_tokens * kind.scale, steps_max)
        answers = serve(core, engine, kind.prompts)
        scores: list[list[TokenLogprobs]] = []
        assert serve(core, engine, kind.prompts, scored, scores=scores) == answers
        assert [len(own) for own in scores] == [length - 1 for length in kind.lengths]
        expected = expected or scores
        for own, first in zip(chain(*scores), chain(*expected), strict=True):
            assert own.logprob == pytest.approx(first.logprob, abs=1e-4)
    assert len({round(own.logprob, 2) for own in chain(*expected)}) > 10


@pytest.mark.parametrize("num_moved", [1, 4, 9])
def test_a_generation_that_is_planned_anew_goes_on(kind: Kind, num_moved: int) -> None:
    """Its tokens so far come as a prompt, which the penalties must not take for one."""
    engine = kind.make(PLENTY)
    whole = serve(core_over(engine, 64), engine, kind.prompts, SAMPLED)
    so_far = [one + tokens[:num_moved] for one, tokens in zip(kind.prompts, whole, strict=True)]
    rest = replace(SAMPLED, max_tokens=SAMPLED.max_tokens - num_moved)
    other = kind.make(PLENTY)
    got = serve(core_over(other, 7), other, so_far, rest, num_moved)
    assert got == [tokens[num_moved:] for tokens in whole]


def test_tokens_are_the_same_with_several_steps_in_flight(kind: Kind) -> None:
    """Most of them are not known when the next step is launched."""
    engine = kind.make(PLENTY)
    for sampling in (GREEDY, SAMPLED):
        expected = serve(core_over(engine, 64), engine, kind.prompts, sampling)
        for max_step_tokens, steps_max in ((3, 2), (64, 2), (64, 3)):
            core = core_over(engine, max_step_tokens * kind.scale, steps_max)
            assert serve(core, engine, kind.prompts, sampling) == expected
    expected = serve(core_over(engine, 64), engine, kind.prompts)
    num_preemptions = 0
    for per_group in kind.scarce:
        engine = kind.make(per_group * len(engine.layout.groups) + 1)
        core = core_over(engine, 64, 2)
        assert serve(core, engine, [kind.prompts[1]] * 4) == [expected[1]] * 4
        num_preemptions += core.batcher.num_preemptions
    assert num_preemptions > 0


def part_of(name: str, tokens: list[int], start: int, tables: list[list[int]]) -> SequenceSlice:
    changes = tuple(TableChange(0, tuple(table)) for table in tables)
    known = [7] * start + tokens  # those before the slice do not matter
    key = RequestKey(name, 1)
    return SequenceSlice(key, tokens, start, True, changes, GREEDY, known_token_ids=known)


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
def test_kv_is_what_the_region_holds(kind: Kind, *, spoiled: bool) -> None:
    """Blocks copied to other places of another engine's region: it goes on as the first one."""
    prompt, rng = kind.prompts[2], random.Random(1)
    one, other = kind.make(PLENTY), kind.make(PLENTY + 10)
    assert isinstance(one.region, PoolRegion)
    assert isinstance(other.region, PoolRegion)
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


def test_a_step_that_cannot_be_computed_is_an_error_and_no_more(kind: Kind) -> None:
    engine = kind.make(PLENTY)
    free = list(range(1, PLENTY))
    good = part_of("good", kind.prompts[1], 0, tables_over(engine, free, kind.lengths[1]))
    token = token_of(engine, good)
    known = replace(good, is_new=False, table_changes=())
    bad = {
        "null": part_of("null", [9], 8, [[0, 0, 0] for _ in engine.layout.groups]),
        "no table": replace(known, key=RequestKey("unknown", 1)),
        "a short table": part_of("short", kind.prompts[1], 0, [[1] for _ in engine.layout.groups]),
    }
    for number, (name, part) in enumerate(bad.items()):
        result = engine.run(Step(number, (part,)))
        assert result.error, name
        assert (result.step_id, result.samples) == (number, ())
        assert token_of(engine, known) == token


def test_what_follows_on_a_failed_step_is_not_computed_and_disturbs_nobody(kind: Kind) -> None:
    engine, free = kind.make(PLENTY), list(range(1, PLENTY))
    lengths, prompts = kind.lengths, kind.prompts
    first = part_of("first", prompts[1], 0, tables_over(engine, free, lengths[1] + 2))
    other = part_of("other", prompts[2], 0, tables_over(engine, free, lengths[2] + 1))
    expected = [token_of(engine, replace(one, key=RequestKey("x", 1))) for one in (first, other)]
    assert token_of(engine, first) == expected[0]
    unknown = replace(first, token_ids=(PLACEHOLDER,), is_new=False, table_changes=())
    steps = [replace(unknown, start=lengths[1] + n) for n in range(2)]
    bad = part_of("null", [9], 8, [[0, 0, 0] for _ in engine.layout.groups])
    assert engine.run(Step(1, (steps[0], bad))).error
    result = engine.run(Step(2, (steps[1], other)))  # launched before that was known
    assert result.error == ""
    dropped, sample = result.samples
    assert dropped is None
    assert sample is not None
    assert sample.token_id == expected[1]
    assert engine.run(Step(3, (steps[1],))).samples == (None,)
    assert token_of(engine, first) == expected[0], "it begins anew"


@pytest.mark.parametrize("beside", [True, False])
def test_a_step_fails_when_the_next_one_is_prepared(kind: Kind, *, beside: bool) -> None:
    """That one is computed without the sequences that are lost; if nothing is left, not at all."""
    engine, free = kind.make(PLENTY), list(range(1, PLENTY))
    lengths, prompts = kind.lengths, kind.prompts
    first = part_of("first", prompts[1], 0, tables_over(engine, free, lengths[1] + 2))
    other = part_of("other", prompts[2], 0, tables_over(engine, free, lengths[2] + 3))
    done = part_of("done", prompts[0], 0, tables_over(engine, free, lengths[0] + 1))
    new = part_of("new", prompts[0], 0, tables_over(engine, free, lengths[0] + 1))
    unknown = replace(other, token_ids=(PLACEHOLDER,), is_new=False, table_changes=())
    expected = [token_of(engine, one) for one in (new, done, first, other)]
    expected.append(token_of(engine, replace(unknown, start=lengths[2])))
    assert token_of(engine, other) == expected[3]
    lost = replace(first, token_ids=(PLACEHOLDER,), is_new=False, table_changes=())
    steps = [
        Step(1, (replace(lost, start=lengths[1]),)),
        Step(
            2,
            (replace(lost, start=lengths[1] + 1),)
            + ((replace(unknown, start=lengths[2]), new) if beside else ()),
            ended=(done.key,),
        ),
        Step(3, (replace(unknown, start=lengths[2] + beside),)),
    ]
    for step in steps[:2]:
        engine.prepare(step)
    assert isinstance(engine.region, PoolRegion)
    place = engine.region.address + first.table_changes[0].new_blocks[0] * engine.region.block_bytes
    kept = ctypes.string_at(place, engine.region.block_bytes)
    ctypes.memset(place, 0xFF, engine.region.block_bytes)
    assert engine.run(steps[0]).error
    engine.prepare(steps[2])  # what it brings is not known yet
    result = engine.run(steps[1])
    assert result.error == ""
    tokens = [None if one is None else one.token_id for one in result.samples]
    assert tokens == [None] + [expected[4], expected[0]] * beside
    result = engine.run(steps[2])
    assert result.error == ""
    if not beside:
        assert [one and one.token_id for one in result.samples] == [expected[4]]
    ctypes.memmove(place, kept, len(kept))
    assert token_of(engine, first) == expected[2], "it begins anew"
    assert engine.run(Step(4, (replace(done, is_new=False, table_changes=()),))).error, "it ended"


def test_who_cannot_be_laid_out_disturbs_neither_the_step_before_nor_others(kind: Kind) -> None:
    engine, free = kind.make(PLENTY), list(range(1, PLENTY))
    lengths, prompts = kind.lengths, kind.prompts
    first = part_of("first", prompts[1], 0, tables_over(engine, free, lengths[1] + 2))
    other = part_of("other", prompts[2], 0, tables_over(engine, free, lengths[2] + 1))
    expected = [token_of(engine, one) for one in (first, other)]
    bad = part_of("null", [9], 8, [[0, 0, 0] for _ in engine.layout.groups])
    unknown = replace(first, token_ids=(PLACEHOLDER,), is_new=False, table_changes=())
    steps = [
        Step(1, (first,)),
        Step(2, (replace(unknown, start=lengths[1]), bad)),
        Step(3, (replace(unknown, start=lengths[1] + 1), other)),
    ]
    for step in steps:
        engine.prepare(step)
    results = [engine.run(step) for step in steps]
    assert [bool(result.error) for result in results] == [False, True, False]
    assert [one and one.token_id for one in results[0].samples] == [expected[0]]
    assert [one and one.token_id for one in results[2].samples] == [None, expected[1]]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_is_computed_that_a_prepared_step_ends(kind: Kind, *, ahead: bool) -> None:
    """Its tables and its earlier tokens are needed until then."""
    engine, free, length = kind.make(PLENTY), list(range(1, PLENTY)), kind.lengths[1]
    first = part_of("first", kind.prompts[1], 0, tables_over(engine, free, length + 2))
    first = replace(first, sampling=replace(SAMPLED, num_prompt_tokens=length))
    other = part_of("other", kind.prompts[0], 0, tables_over(engine, free, 1))
    unknown = replace(first, token_ids=(PLACEHOLDER,), is_new=False, table_changes=())
    (alone,) = serve(core_over(engine, 1_000), engine, [kind.prompts[1]], SAMPLED)
    steps = [
        Step(1, (first,)),
        Step(2, (replace(unknown, start=length),)),
        Step(3, (other,), ended=(first.key,)),
    ]
    for step in steps if ahead else ():
        engine.prepare(step)
    results = [engine.run(step) for step in steps]
    assert [result.error for result in results] == ["", "", ""]
    tokens = [one and one.token_id for result in results[:2] for one in result.samples]
    assert tokens == alone[:2]


def test_a_placeholder_that_nothing_was_sampled_for_is_an_error(kind: Kind) -> None:
    engine = kind.make(PLENTY)
    tables = tables_over(engine, list(range(1, PLENTY)), kind.lengths[1])
    assert engine.run(Step(1, (part_of("r", [PLACEHOLDER], 0, tables),))).error


def test_a_sequence_that_ended_is_forgotten(kind: Kind) -> None:
    engine = kind.make(PLENTY)
    part = part_of(
        "r", kind.prompts[1], 0, tables_over(engine, list(range(1, PLENTY)), kind.lengths[1])
    )
    token = token_of(engine, part)
    known = replace(part, is_new=False, table_changes=())
    assert token_of(engine, known) == token
    other = part_of("other", kind.prompts[0], 0, tables_over(engine, list(range(1, 20)), 1))
    assert engine.run(Step(2, (other,), ended=(part.key,))).error == ""
    assert engine.run(Step(3, (known,))).error
    assert token_of(engine, part) == token
