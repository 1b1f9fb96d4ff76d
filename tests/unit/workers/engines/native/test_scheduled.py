"""Every family under the production scheduler: tokens are those of plain transformers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disagg.kv.chunking import Chunking
from disagg.messages.sampling import TokenLogprobs
from disagg.scheduling.admission import num_blocks_for
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import STEPS_MAX
from disagg.workers.engines import logprobs
from disagg.workers.engines.block_tokens import DEFAULT
from disagg.workers.engines.native.families import SUPPORTED
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.options import WorkerOptions
from tests.checkpoints import make_checkpoint, reference_generate, reference_logits
from tests.tiny_families import FAMILIES
from tests.unit.workers.engines.native.runs import TOLERANCE, Reference, clear_prompt
from tests.unit.workers.engines.serving import GREEDY, core_over, serve

STATES = sorted(
    name for name, tiny in FAMILIES.items() if SUPPORTED[tiny.model.__name__].has_states
)
SLOW_STATES = [family for family in STATES if family not in ("lfm2", "nemotron_h")]
DEFAULTS = WorkerOptions("", "both", "", "", ())
BLOCK, WINDOW, PLENTY = 8, 32, 400
LENGTHS = (1, 9, 33, 75)
"""Beside each other; with ten tokens more the last crosses the ends of chunks 32 and 64."""
NUM_BEST = 3
SCORED = replace(GREEDY, num_prompt_logprobs=NUM_BEST)
GROWING = 23
"""A prompt whose answer needs blocks more, in every kind of group but those of states."""


class Model:
    """A checkpoint, an engine over it, and what plain transformers says follows its prompts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine = NativeEngine(directory, num_blocks=PLENTY, block_tokens=BLOCK)
        self._drawn: dict[int, tuple[list[int], Reference]] = {}

    def drawn(self, *lengths: int) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts of these lengths, and their answers."""
        for length in lengths:
            if length not in self._drawn:
                self._drawn[length] = clear_prompt(self.directory, length)
        found = [self._drawn[length] for length in lengths]
        return [prompt for prompt, _ in found], [tokens for _, (tokens, _) in found]

    def core(self, max_step_tokens: int, num_blocks: int = PLENTY) -> WorkerCore:
        """A scheduler with nothing cached, over poisoned blocks."""
        self.engine.pool.poison(range(1, PLENTY))
        pool = SimpleNamespace(num_blocks=num_blocks)
        over = SimpleNamespace(layout=self.engine.layout, region=pool)
        return core_over(cast(Any, over), max_step_tokens, STEPS_MAX)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("model")
    model = Model(make_checkpoint(folder, request.param, window=WINDOW))
    yield model
    model.engine.close()


@pytest.mark.parametrize("max_step_tokens", [7, 64])
def test_chunks_beside_each_other_and_prefix_hits(model: Model, max_step_tokens: int) -> None:
    prompts, expected = model.drawn(*LENGTHS)
    core = model.core(max_step_tokens)
    hits: list[int] = []
    for known in ([0, 0, 0, 0], [0, 8, 32, 72]):
        assert serve(core, model.engine, prompts, hits=hits) == expected
        assert hits == known


def test_preempted_and_resumed(model: Model) -> None:
    (prompt,), (expected,) = model.drawn(GROWING)
    fits = num_blocks_for(model.core(64).kv, GROWING + GREEDY.max_tokens)
    for num_blocks in range(fits + 1, 4 * fits):
        core = model.core(64, num_blocks)
        assert serve(core, model.engine, [prompt] * 4) == [expected] * 4
        if core.batcher.num_preemptions:
            return
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize(
    ("family", "ends_chosen"),
    [
        ("lfm2", True),
        ("lfm2", False),
        ("nemotron_h", True),
        *(pytest.param(family, True, marks=pytest.mark.slow) for family in SLOW_STATES),
    ],
)
def test_a_common_prefix_is_found_with_the_default_settings(
    family: str, ends_chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: not where the chunks of models with states end anywhere."""
    if not ends_chosen:
        monkeypatch.setattr(Chunking, "chunk_end", lambda *_: None)
    directory = make_checkpoint(tmp_path, family)
    engine = NativeEngine(directory, num_blocks=2000)
    core = core_over(engine, DEFAULTS.max_step_tokens, STEPS_MAX)
    assert engine.layout.hash_block_tokens == DEFAULT == 16
    common, *others = ([7 + (k * n) % 300 for n in range(1, 300)] for k in (11, 13, 17, 19))
    rounds = {
        "behind others": ([*(other[:90] for other in others), common[:280]], [0] * 4),
        "again, longer, and left at 200": (
            [common[:280], [*common[:280], *others[0][:30]], [*common[:200], *others[1][:60]]],
            [272, 272, 0],
        ),
        "left at 200 once more": ([[*common[:200], *others[2][:60]]], [192]),
    }
    hits: list[int] = []
    for name, (prompts, found) in rounds.items():
        answers = serve(core, engine, prompts, hits=hits)
        assert hits == (found if ends_chosen else [0] * len(prompts)), name
        for prompt, answer in zip(prompts, answers, strict=True):
            expected, _, gap = reference_generate(directory, prompt, GREEDY.max_tokens)
            assert answer == expected, gap


def scores_of(model: Model, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
    """By plain transformers, of each prompt's tokens from the second on."""
    found = []
    for prompt in prompts:
        logits = reference_logits(model.directory, prompt)
        values = logits.log_softmax(-1)
        best = values.topk(NUM_BEST)
        found.append(
            [
                TokenLogprobs(
                    float(values[at - 1, token]),
                    tuple(
                        zip(
                            best.indices[at - 1].tolist(), best.values[at - 1].tolist(), strict=True
                        )
                    ),
                    1 + int((logits[at - 1] > logits[at - 1, token]).sum()),
                )
                for at, token in enumerate(prompt[1:], 1)
            ]
        )
    return found


def are_equal(ours: list[TokenLogprobs], plain: list[TokenLogprobs]) -> bool:
    """To 1e-4; where ranks differ, or the best are others, their numbers are that close."""
    return len(ours) == len(plain) and all(
        abs(own.logprob - one.logprob) < TOLERANCE
        and abs(own.rank - one.rank) <= 2
        and own.rank >= 1
        and len(own.top) == NUM_BEST
        and all(
            abs(logprob - other) < TOLERANCE
            for (_, logprob), (_, other) in zip(own.top, one.top, strict=True)
        )
        for own, one in zip(ours, plain, strict=True)
    )


@pytest.mark.parametrize("max_step_tokens", [7, 64])
def test_prompt_logprobs_are_those_of_the_plain_forward(
    model: Model, max_step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, beside each other, a few rows at a time, and in spite of what is cached."""
    monkeypatch.setattr(logprobs, "LOGITS_BYTES_MAX", 5 * 4 * model.engine.vocab_size)
    prompts, expected = model.drawn(*LENGTHS)
    plain = scores_of(model, prompts)
    core = model.core(max_step_tokens)
    hits: list[int] = []
    scores: list[list[TokenLogprobs]] = []
    for _ in range(2):
        assert serve(core, model.engine, prompts, SCORED, hits=hits, scores=scores) == expected
        assert hits == [0] * len(prompts)
        assert all(map(are_equal, scores, plain))
    assert not are_equal(scores[3][1:], plain[3][:-1])  # control: a place further
    assert serve(core, model.engine, prompts, hits=hits, scores=scores) == expected
    assert scores == [[]] * len(prompts)
    assert hits[3] == 72, "what was scored is cached for others"
