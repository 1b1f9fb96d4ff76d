"""Trains the demo's model on a course of growing difficulty, and measures it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Gemma3ForCausalLM, PreTrainedTokenizerFast

from demo.model import build_model
from demo.prompts import DemoPrompt, demo_prompts
from demo.task import EOS, PAD, VALUES, WORD_IDS, Difficulty, draw_sequence

_PAD_ID = WORD_IDS[PAD]
_FIRST_VALUE_ID = WORD_IDS[VALUES[0]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One difficulty, trained until it is mastered.

    Attributes:
        name: for people, unique in its recipe.
        difficulty: what is drawn.
        fewest_records: documents have this many records up to the difficulty's own number.
        batch_sequences: sequences per step.
        steps_max: give the attempt up if the target is not reached by then.
        accuracy_target: leave when the running accuracy of the worst kind of word reaches this;
            None: train all ``steps_max`` steps, with a rate that falls to zero.
        rate: factor on the learning rates.
    """

    name: str
    difficulty: Difficulty
    fewest_records: int
    batch_sequences: int
    steps_max: int
    accuracy_target: float | None
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights besides the seed."""

    stages: tuple[Stage, ...]
    matrix_lr: float = 0.04
    other_lr: float = 0.005
    warmup_steps: int = 20


# The look-up circuit appears by a sudden step, soon only if the alphabet is small and the answer
# a bare copy; it then carries over to all words, delays, joining words and lengths.
RECIPE = Recipe(
    stages=(
        Stage("copy", Difficulty(6, 16, 24, 10, 0, asks_plainly=True), 6, 16, 800, 0.94),
        Stage("join", Difficulty(6, 32, 48, 6, 3), 6, 12, 500, 0.95),
        Stage("widen", Difficulty(14, 128, 200, 8, 10), 7, 8, 500, 0.95, rate=0.8),
        Stage("lengthen", Difficulty(36, 128, 200, 10, 12), 14, 6, 120, None, rate=0.6),
    )
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an attempt stands after one step; ``accuracy`` is a running mean."""

    stage: Stage
    steps: int
    accuracy: float

    @property
    def is_mastered(self) -> bool:
        """Whether the stage ends here with its target reached."""
        if self.stage.accuracy_target is None:
            return self.steps == self.stage.steps_max
        return self.accuracy >= self.stage.accuracy_target


def attempt(
    recipe: Recipe, seed: int, report: Callable[[Progress], None]
) -> tuple[Gemma3ForCausalLM, bool]:
    """Train a new model from ``seed``, calling ``report`` after every step.

    Changes torch's thread count to one, so that sums are made in one order everywhere.

    Returns:
        The model, ready for inference, and whether every stage was mastered.
    """
    torch.set_num_threads(1)
    model = build_model(seed)
    model.train()
    finished = train(model, recipe, seed, report)
    model.train(False)
    return model, finished


def train(
    model: Gemma3ForCausalLM, recipe: Recipe, seed: int, report: Callable[[Progress], None]
) -> bool:
    """Train the model in place, calling ``report`` after every step.

    Returns:
        Whether every stage was mastered; False as soon as one runs out of steps.
    """
    rng = Random(f"demo training {seed}")
    matrices, others = _split_parameters(model)
    # What makes the look-up circuit appear within seconds; AdamW alone stays at "some value of the
    # document" for many times longer.
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.9, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0)
    total_steps = 0
    for stage in recipe.stages:
        accuracy = 0.0
        for step in range(1, stage.steps_max + 1):
            total_steps += 1
            scale = stage.rate * min(1.0, total_steps / recipe.warmup_steps)
            if stage.accuracy_target is None:
                scale *= 1 - (step - 1) / stage.steps_max
            loss, hits = _loss_and_accuracy(model, *draw_batch(rng, stage))
            model.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            adam.param_groups[0]["lr"] = recipe.other_lr * scale
            adam.step()
            muon.param_groups[0]["lr"] = recipe.matrix_lr * scale
            muon.step()  # type: ignore[no-untyped-call]
            accuracy = 0.9 * accuracy + 0.1 * hits
            progress = Progress(stage, step, accuracy)
            report(progress)
            if progress.is_mastered:
                break
        else:
            return False
    return True


def draw_batch(rng: Random, stage: Stage) -> tuple[Tensor, Tensor]:
    """Draw token ids and labels, both int64 ``[batch, tokens]``, padded on the right."""
    num_records = rng.randint(stage.fewest_records, stage.difficulty.num_records)
    rows = [draw_sequence(rng, stage.difficulty, num_records) for _ in range(stage.batch_sequences)]
    num_tokens = max(len(words) for words, _ in rows)
    words, labels = (
        torch.tensor(
            [[WORD_IDS[w] for w in row] + [_PAD_ID] * (num_tokens - len(row)) for row in side]
        )
        for side in zip(*rows, strict=True)
    )
    return words, labels


def held_out_prompts(num_lists: int) -> list[DemoPrompt]:
    """Prompts like the demo's; the first list is the demo's own default one."""
    return [prompt for seed in range(num_lists) for prompt in demo_prompts(seed)]


def answer_accuracy(
    model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[DemoPrompt]
) -> float:
    """Share of prompts whose whole greedy answer, end of sequence included, is right."""
    right = sum(answers_exactly(model, tokenizer, prompt) for prompt in prompts)
    return right / len(prompts)


@torch.no_grad()
def answers_exactly(
    model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: DemoPrompt
) -> bool:
    """Whether greedy decoding gives the expected answer and then stops.

    One forward pass tells: greedy decoding is right if and only if each right token is the most
    likely one after the right tokens before it.
    """
    question = prompt_token_ids(tokenizer, prompt)
    answer = [WORD_IDS[word] for word in [*prompt.expected.split(), EOS]]
    token_ids = torch.tensor([question + answer])
    logits = model(input_ids=token_ids, use_cache=False).logits
    return bool((logits[0, len(question) - 1 : -1].argmax(-1) == torch.tensor(answer)).all())


def prompt_token_ids(tokenizer: PreTrainedTokenizerFast, prompt: DemoPrompt) -> list[int]:
    """Token ids of a prompt as a server makes them: templated for a chat, ``<bos>`` in front."""
    if prompt.kind == "completion":
        return list(tokenizer(prompt.text).input_ids)
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _split_parameters(
    model: Gemma3ForCausalLM,
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices of the layers (for Muon), and embeddings and norms (for AdamW)."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and ".layers." in name
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _loss_and_accuracy(
    model: Gemma3ForCausalLM, token_ids: Tensor, labels: Tensor
) -> tuple[Tensor, float]:
    """Mean loss over labelled positions; accuracy of the values or of the other words, the worse.

    Stops and joining words are easy and many: a mean would hide that look-ups still fail.
    """
    asked = labels != _PAD_ID
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[asked])
    targets = labels[asked]
    right = (logits.detach().argmax(-1) == targets).float()
    is_value = targets >= _FIRST_VALUE_ID
    accuracy = min(right[is_value].mean().item(), right[~is_value].mean().item())
    return cross_entropy(logits, targets), accuracy
