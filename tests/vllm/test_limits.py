"""What would break vLLM's runner never reaches it; what fails there leaves nothing behind."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step, TableChange
from disagg.workers.engines.protocol import EngineFailedError
from tests.vllm.conftest import NUM_BLOCKS, Loaded
from tests.vllm.engines import BLOCK_TOKENS
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GREEDY = SamplingParams(max_tokens=6)
PROMPT = [(3 * i) % 89 + 7 for i in range(100)]
MAX_TOKENS, MAX_STEP_TOKENS, MAX_SEQUENCES = 1024, 512, 8
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def loaded(load: Callable[[str], Loaded]) -> Loaded:
    return load("gemma3")


@pytest.fixture
def engine(loaded: Loaded) -> Iterator[Any]:
    """The runner that counts its calls, and holds nobody before and after."""
    engine = loaded.engine
    empty(engine)
    yield engine
    empty(engine)


def answer(engine: Any, prompt: list[int] = PROMPT) -> list[int]:
    serving = Serving(engine)
    serving.submit("good", prompt, GREEDY)
    serving.run()
    return serving.tokens("good")


def empty(engine: Any) -> None:
    """The end of a sequence reaches the runner with a later step: only that step's one is left."""
    last = Serving(engine)
    last.submit("last", [9], replace(GREEDY, max_tokens=1))
    step, _ = last.core.next_step(0)
    assert step is not None
    assert engine.run(replace(step, ended=engine_keys(engine))).error == ""
    assert len(engine.batch) == engine.runner.num_requests == engine.runner.num_rows == 1
    assert engine.runner.num_histories == 0


def engine_keys(engine: Any) -> tuple[RequestKey, ...]:
    """Of the sequences the engine holds."""
    split = (name.split("/") for name in engine.batch.names)
    return tuple(RequestKey(request, int(number), router) for router, request, number in split)


def part(
    name: str, length: int, *, start: int = 0, first_block: int = 1, **changed: Any
) -> SequenceSlice:
    """A new sequence's slice with blocks of its own."""
    known = [(5 * i) % 89 + 7 for i in range(start + length)]
    count = -(-(start + length) // BLOCK_TOKENS)
    changes = tuple(
        TableChange(0, tuple(range(first_block + group * count, first_block + (group + 1) * count)))
        for group in range(changed.pop("groups"))
    )
    whole = SequenceSlice(
        RequestKey(name, 1), known[start:], start, True, changes, GREEDY, known_token_ids=known
    )
    return replace(whole, **changed)


def test_oversized_steps_are_refused_before_the_call(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = answer(engine)
    groups = len(engine.layout.groups)
    good = part("x", 10, groups=groups)
    known = good.known_token_ids
    refused = {
        "too many tokens": (
            "at most 8 of 512",
            (part("x", MAX_STEP_TOKENS + 1, groups=groups),),
        ),
        "too many sequences": (
            "at most 8 of 512",
            tuple(
                part(str(n), 3, first_block=1 + n * groups, groups=groups)
                for n in range(MAX_SEQUENCES + 1)
            ),
        ),
        "no tokens": ("at most", (replace(good, token_ids=[]),)),
        "too long": ("do not lie in", (part("x", 4, start=MAX_TOKENS - 4, groups=groups),)),
        "before the start": ("do not lie in", (replace(good, start=-1),)),
        "a token too large": (
            "token id",
            (replace(good, known_token_ids=[*known[:-1], VOCAB_SIZE]),),
        ),
        "a negative token": ("token id", (replace(good, known_token_ids=[-1, *known[1:]]),)),
        "a bias beyond the vocabulary": (
            "token id with a bias",
            (replace(good, sampling=replace(GREEDY, logit_bias=((1, 1.0), (VOCAB_SIZE, 1.0)))),),
        ),
        "unknown tokens": ("are known", (replace(good, known_token_ids=known[:5]),)),
        "a short table": (
            "ends before block index",
            (part("x", BLOCK_TOKENS + 1, groups=groups, table_changes=good.table_changes),),
        ),
        "a null block": (
            "null block",
            (replace(good, table_changes=(TableChange(0, (0,)),) * groups),),
        ),
        "a block that is not there": (
            "block id",
            (replace(good, table_changes=(TableChange(0, (NUM_BLOCKS,)),) * groups),),
        ),
        "too few groups": ("groups", (replace(good, table_changes=good.table_changes[1:]),)),
        "twice": ("two slices", (good, good)),
        "not held": ("not", (replace(good, is_new=False, key=RequestKey("unknown", 1)),)),
    }
    calls: list[object] = []
    run = engine.runner.run

    def counted(*order: Any) -> Any:
        calls.append(order)
        return run(*order)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", counted)
        for name, (reason, slices) in refused.items():
            result = engine.run(Step(1, slices))
            assert reason in result.error, name
            assert result.samples == ()
            assert not calls, name
        assert engine.run(Step(2, (good,))).error == ""  # control: what is kept is right
        assert calls
    assert answer(engine) == right


def test_a_sequence_of_a_refused_step_is_not_held(engine: Any) -> None:
    groups = len(engine.layout.groups)
    good, wrong = part("x", 10, groups=groups), part("y", 10, first_block=50, groups=groups)
    wrong = replace(wrong, known_token_ids=[VOCAB_SIZE] * 10)
    assert "token id" in engine.run(Step(1, (good, wrong))).error
    later = replace(good, is_new=False, table_changes=())
    assert engine.run(Step(2, (later,))).samples == (None,), "it is lost"
    assert good.key not in engine.batch
    assert engine.run(Step(3, (good,))).error == ""
    assert engine.run(Step(4, (later,))).error == ""


def test_what_ends_in_a_refused_step_ends(engine: Any) -> None:
    groups = len(engine.layout.groups)
    good = part("x", 10, groups=groups)
    assert engine.run(Step(1, (good,))).error == ""
    wrong = part("y", MAX_STEP_TOKENS + 1, groups=groups)
    assert engine.run(Step(2, (wrong,), ended=(good.key,))).error
    assert answer(engine)
    assert good.key not in engine.batch
    assert engine.runner.num_requests == len(engine.batch) == 2  # "last" and "good"


def test_the_longest_sequence_is_computed(engine: Any) -> None:
    """Control of the bound: one token less than too long."""
    groups = len(engine.layout.groups)
    prompt = part("long", MAX_TOKENS - 2, groups=groups)
    changes = prompt.table_changes
    half = MAX_STEP_TOKENS
    tokens = list(prompt.known_token_ids)
    first = replace(prompt, token_ids=tokens[:half], sampling=None)
    then = replace(prompt, token_ids=tokens[half:], start=half, is_new=False, table_changes=())
    assert len(changes[0].new_blocks) == MAX_TOKENS // BLOCK_TOKENS
    assert engine.run(Step(1, (first,))).error == ""
    result = engine.run(Step(2, (then,)))
    assert result.error == ""
    (sample,) = result.samples
    last = replace(then, token_ids=[sample.token_id], start=MAX_TOKENS - 2)
    assert engine.run(Step(3, (last,))).error == ""
    beyond = replace(last, start=MAX_TOKENS - 1)
    assert "do not lie in" in engine.run(Step(4, (beyond,))).error


def test_a_state_that_is_not_finite_fails_its_sequence_alone(engine: Any) -> None:
    right = answer(engine)
    groups = len(engine.layout.groups)
    good = part("x", 64, groups=groups)
    other = part("other", 20, first_block=100, groups=groups)
    (_, beside_it) = engine.run(Step(1, (good, other))).samples
    again = replace(good, token_ids=good.token_ids[40:], start=40, is_new=False, table_changes=())
    assert engine.run(Step(2, (again,))).error == ""  # control
    block = good.table_changes[-1].new_blocks[0]
    before = engine.pool[block].clone()
    engine.pool[block] = -1
    beside = replace(other, is_new=False, table_changes=())
    result = engine.run(Step(3, (again, beside)))
    assert result.error == ""
    assert "NonFiniteError" in result.errors[0]
    assert (result.errors[1], result.samples) == ("", (None, beside_it))
    result = engine.run(Step(4, (again, beside)))
    assert (result.errors, result.samples) == ((), (None, beside_it)), "who failed begins anew"
    unsampled = replace(again, sampling=None, is_new=True, table_changes=good.table_changes)
    assert "NonFiniteError" in engine.run(Step(4, (unsampled,))).error
    assert engine.run(Step(5, (other,))).error == ""
    assert answer(engine) == right
    engine.pool[block] = before
    ended: tuple[RequestKey, ...] = (good.key, other.key)
    # What failed has left NaN in blocks: whoever gets them next does not see it.
    for number in range(3):
        fresh = part(f"fresh-{number}", 33, groups=groups)
        result = engine.run(Step(6, (fresh,), ended=ended))
        assert result.error == ""
        ended = (fresh.key,)


@pytest.mark.parametrize("scored", [False, True], ids=["its token's", "its prompt's"])
def test_a_logit_that_is_not_finite_fails_its_sequence_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch, *, scored: bool
) -> None:
    """A hidden state can be finite, and a logit too large for its type."""
    groups = len(engine.layout.groups)
    good = part("x", 20, groups=groups)
    bad = part("bad", 30, first_block=100, groups=groups)
    if scored:
        bad = replace(bad, scored_token_ids=tuple(bad.known_token_ids[1:]), num_prompt_logprobs=1)
    (right, _) = engine.run(Step(1, (good, bad))).samples  # control
    model = engine.runner._runner.get_model()
    computed = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = computed(hidden_states)
        # A row per sequence where tokens are drawn, a row per token where a prompt is scored.
        is_scoring = len(hidden_states) > 2
        if is_scoring == scored:
            logits[-1, 7] = float("inf")
        return logits

    monkeypatch.setattr(model, "compute_logits", compute_logits)
    again = [replace(one, is_new=True) for one in (good, bad)]
    result = engine.run(Step(2, tuple(again), ended=engine_keys(engine)))
    assert result.error == ""
    assert result.errors[0] == ""
    assert "NonFiniteError" in result.errors[1]
    assert result.samples == (right, None)
    monkeypatch.undo()
    ended = (good.key, bad.key)
    fresh = part("fresh", 33, groups=groups)
    assert engine.run(Step(3, (fresh,), ended=ended)).error == ""
    assert engine.runner.num_requests == len(engine.batch) == 1


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "control"])
def test_a_step_fails_when_the_next_one_is_described(
    engine: Any, *, beside: bool, forgetful: bool
) -> None:
    """Neighbours' tokens are exact; who ends in a step that is not computed leaves the runner."""
    groups = len(engine.layout.groups)
    good = part("x", 60, groups=groups)
    other = part("other", 20, first_block=100, groups=groups)
    gone = part("gone", 10, first_block=140, groups=groups)

    def decode(of: SequenceSlice, number: int) -> SequenceSlice:
        at = of.start + len(of.token_ids) + number
        return replace(of, token_ids=(PLACEHOLDER,), start=at, is_new=False, table_changes=())

    assert engine.run(Step(1, (good, other, gone), ended=engine_keys(engine))).error == ""
    alone = [engine.run(Step(2, (decode(other, number),))) for number in range(3)]
    tokens = [result.samples[0].token_id for result in alone]
    assert engine.run(Step(3, (replace(other, is_new=True),))).error == ""
    failing = Step(4, (decode(good, 0),))
    next_one = Step(
        5, (decode(good, 1), *([decode(other, 0)] if beside else [])), ended=(gone.key,)
    )
    engine.prepare(failing)
    engine.prepare(next_one)
    block = good.table_changes[-1].new_blocks[0]
    before = engine.pool[block].clone()
    engine.pool[block] = -1
    assert "NonFiniteError" in engine.run(failing).error
    engine.pool[block] = before
    result = engine.run(next_one)
    assert result.error == ""
    assert [one and one.token_id for one in result.samples] == [None, *tokens[:beside]]
    if forgetful:
        engine._steps._computed.ended = ()
    for number in range(beside, 3):
        result = engine.run(Step(6, (decode(other, number),)))
        assert result.samples[0].token_id == tokens[number]
    assert engine.batch.names == {"/x/1", "/other/1"}
    assert engine.runner.num_requests == 2 + (forgetful and not beside)
    assert engine.runner.num_rows == 1
    last = part("y", 5, groups=groups)
    ended = (good.key, other.key, gone.key)
    assert engine.run(Step(7, (last,), ended=ended)).error == ""
    assert engine.batch.names == {"/y/1"}
    assert engine.runner.num_requests == engine.runner.num_rows == 1


def test_unwritten_slots_do_not_matter(engine: Any) -> None:
    """All that is free is NaN, and so is the null block, for ever."""
    right = answer(engine)
    engine.pool.fill_(-1)
    assert answer(engine) == right
    assert bool((engine.pool[0] == -1).all())


def test_nobody_is_left_behind(engine: Any) -> None:
    """After cancels, preemption, failed steps and ends of every kind."""
    rng = random.Random(5)
    groups = len(engine.layout.groups)
    preemptions = failures = 0
    for round_ in range(6):
        serving = Serving(engine, 64, num_blocks=7 * groups + 1)
        keys = [
            serving.submit(
                f"{round_}-{n}",
                [rng.randrange(7, 320) for _ in range(rng.randrange(1, 90))],
                SamplingParams(max_tokens=rng.randrange(1, 40)),
            )
            for n in range(8)
        ]
        number = 0
        while serving.core.sequences:
            number += 1
            if number % 5 == 0:
                serving.core.on_router_message(0, Cancel(keys[number // 5 % len(keys)], "test"))
                if not serving.core.sequences:
                    break
            if number == 12:
                engine.pool[1:] = -1  # all KV is lost: who reads some fails
            error = serving.step()
            assert error == "" or (number >= 12 and "NonFiniteError" in error)
            failures += bool(error)
            assert engine.runner.num_requests == len(engine.batch)
        # Ends reach the engine with the step after.
        serving.submit("last", [9], replace(GREEDY, max_tokens=1))
        assert serving.step() == ""
        assert engine.batch.names == {"/last/1"}
        assert engine.runner.num_requests == engine.runner.num_rows == 1
        preemptions += serving.core.batcher.num_preemptions
    assert preemptions
    assert failures


@pytest.mark.parametrize("where", ["runner.run", "batch.names_of"])
def test_an_exception_in_the_runner_or_at_its_batch_is_the_end(
    engine: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    right = answer(engine)

    def broken(*_: object) -> None:
        raise IndexError("out of everything")

    groups = len(engine.layout.groups)
    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine, owner), name, broken)
        with pytest.raises(EngineFailedError, match="IndexError: out of everything"):
            engine.run(Step(1, (part("x", 10, groups=groups),)))
        if where == "batch.names_of":
            del engine.batch._num_sent["/x/1"]  # which was not told
    with pytest.raises(EngineFailedError, match="out of everything"):  # and stays it
        engine.run(Step(2, (part("x", 10, groups=groups),)))
    engine._failed = ""  # the runner itself was not touched
    assert answer(engine) == right


def test_the_null_block_is_nan(engine: Any) -> None:
    assert bool(engine.pool[0].view(torch.float32).isnan().all())
