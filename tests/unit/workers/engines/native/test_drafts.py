"""Speculative decoding by the native engine: the tokens of plain transformers, in fewer steps.

A bias leaves the models a few tokens, which come again and again: so some drafts are right and some
are wrong.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disagg.errors import ConfigError
from disagg.messages.outputs import SequenceOutput, StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.scheduling import step_side
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.drafts import accepted
from disagg.scheduling.limits import STEPS_MAX
from disagg.scheduling.step import SequenceSlice, StepResult
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint, reference_generate
from tests.unit.workers.engines.native.runs import GAP_MIN, TOLERANCE
from tests.unit.workers.engines.serving import core_over, serve

FAMILIES = ("llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3")
"""Full attention, windows, sinks, chunks, latents."""
DRAFTS, BLOCK, WINDOW, NUM_TOKENS = 4, 8, 32, 40
FEW = (20, 21, 22)
GREEDY = SamplingParams(NUM_TOKENS, num_logprobs=0, logit_bias=tuple((one, 90.0) for one in FEW))
LENGTHS = (1, 9, 30, 45)
"""Of prompts beside each other; answers cross the ends of blocks, windows and chunks."""


def prompt_of(length: int) -> list[int]:
    return [FEW[(at * at // 3) % 3] for at in range(length)]


class Model:
    """An engine that computes drafts, and what follows when one request after the other asks it."""

    def __init__(self, directory: Path, num_drafts: int = DRAFTS) -> None:
        self.directory = directory
        self.engine = NativeEngine(
            directory, num_blocks=200, block_tokens=BLOCK, num_speculative_tokens=num_drafts
        )

    def core(self, num_drafts: int = DRAFTS, steps_max: int = STEPS_MAX) -> WorkerCore:
        """A scheduler with nothing cached, over poisoned blocks."""
        self.engine.pool.poison(range(1, 200))
        return core_over(self.engine, 64, steps_max, num_drafts)

    def answers(
        self, core: WorkerCore, sampling: SamplingParams = GREEDY
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and logprobs that the prompts are answered with, beside each other."""
        outputs: list[SequenceOutput] = []
        done = core.on_step_done

        def on_step_done(now_ms: int, result: StepResult) -> list[WorkerAction]:
            actions = done(now_ms, result)
            told = [one.message for one in actions if isinstance(one, ToRouter)]
            for message in told:
                outputs.extend(message.outputs if isinstance(message, StepOutputs) else ())
            return actions

        core.on_step_done = on_step_done  # type: ignore[method-assign]
        tokens = serve(core, self.engine, [prompt_of(length) for length in LENGTHS], sampling)
        logprobs = [
            [
                logprob.logprob
                for output in outputs
                if output.key.request_id == str(number)
                for logprob in output.logprobs
            ]
            for number in range(len(LENGTHS))
        ]
        return list(zip(tokens, logprobs, strict=True))


def only_few(logits: torch.Tensor, _: object) -> torch.Tensor:
    biased = logits.clone()
    biased[list(FEW)] += 90.0
    return biased


def accepted_of(core: WorkerCore) -> tuple[int, int]:
    """Drafts that were right, and that were wrong."""
    counts = core.counters.counts
    right = counts.get("accepted_draft_tokens", 0)
    return right, counts.get("draft_tokens", 0) - right


def are_close(one: list[float], other: list[float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= TOLERANCE for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_those_of_plain_transformers(family: str, tmp_path: Path) -> None:
    model = Model(make_checkpoint(tmp_path, family, window=WINDOW))
    core = model.core()
    found = model.answers(core)
    right, wrong = accepted_of(core)
    assert right > NUM_TOKENS
    assert wrong > 0
    num_clear = 0
    for length, (tokens, logprobs) in zip(LENGTHS, found, strict=True):
        expected, expected_logprobs, gap = reference_generate(
            model.directory, prompt_of(length), NUM_TOKENS, only_few
        )
        clear = gap > GAP_MIN
        num_clear += clear
        assert tokens == expected or not clear, gap
        assert are_close(logprobs, expected_logprobs) or not clear, gap
    assert num_clear > 0
    plain = model.core(num_drafts=0)
    without = model.answers(plain)
    assert accepted_of(plain) == (0, 0)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in without]
    assert all(map(are_close, [one[1] for one in found], [one[1] for one in without]))


@pytest.mark.parametrize("steps_max", [1, 2])
def test_sampled_tokens_are_those_without_drafts(steps_max: int, tmp_path: Path) -> None:
    model = Model(make_checkpoint(tmp_path, "gemma3", window=WINDOW))
    for seed in range(3):
        sampling = replace(GREEDY, temperature=0.9, top_p=0.95, seed=seed)
        core, plain = model.core(DRAFTS, steps_max), model.core(0, steps_max)
        found, without = model.answers(core, sampling), model.answers(plain, sampling)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in without]
        right, wrong = accepted_of(core)
        assert right > 0
        assert wrong > 0
        assert accepted_of(plain) == (0, 0)


def test_control_one_draft_too_many_gives_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_more(
        part: SequenceSlice, first: SampledToken, after: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        return (first, *after)[: len(accepted(part, first, after)) + 1]

    model = Model(make_checkpoint(tmp_path, "llama"))
    found = model.answers(model.core())
    monkeypatch.setattr(step_side, "accepted", one_more)
    assert model.answers(model.core()) != found


def test_linear_states_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "lfm2")
    with pytest.raises(ConfigError, match="linear states, which cannot go back") as caught:
        Model(directory)
    assert caught.value.param == "scheduling.num_speculative_tokens"
    assert not Model(directory, 0).engine.drafts.num_tokens
