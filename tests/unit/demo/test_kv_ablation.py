"""The trained model's answers break when, and only when, the KV they need is lost.

Slow: the checkpoint is trained once, about a minute of one core.
"""

import copy
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache, Gemma3ForCausalLM, PreTrainedTokenizerFast

from demo.model import WINDOW_TOKENS
from demo.prompts import DemoPrompt, demo_prompts
from demo.task import EOS, WORD_IDS
from demo.train import make_checkpoint
from demo.training import RECIPE, prompt_token_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_TOKENS = 16
PROMPT_SEEDS = range(1000, 1020)  # none of those that decided whether the checkpoint is good

Edit = Callable[["Trained", DynamicCache, list[int], DemoPrompt], None]


class Trained:
    """A checkpoint, loaded as a user loads it."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.model = Gemma3ForCausalLM.from_pretrained(directory)
        self.tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory)
        kinds = self.model.config.layer_types or []
        self.full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        self.sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]

    @torch.no_grad()
    def decode(self, prompt: DemoPrompt, edit: Edit, num_given: int) -> list[int]:
        """Answer as a decode worker does that got the KV of all tokens but the last.

        ``num_given`` tokens of the right answer were emitted by the prefill worker: their KV is
        computed here, on top of what ``edit`` left of the prompt's.
        """
        answer = answer_ids(prompt)
        prompt_ids = prompt_token_ids(self.tokenizer, prompt)
        num_sent = len(prompt_ids) if num_given else len(prompt_ids) - 1
        cache_ = self._prefilled(tuple(prompt_ids[:num_sent]))
        edit(self, cache_, prompt_ids, prompt)
        given = answer[:num_given]
        last = (prompt_ids + given)[num_sent:]
        while len(given) < len(answer):
            logits = self.model(
                input_ids=torch.tensor([last]), past_key_values=cache_, use_cache=True
            ).logits
            last = [int(logits[0, -1].argmax())]
            given = given + last
            if last == [WORD_IDS[EOS]]:
                break
        return given

    def _prefilled(self, token_ids: tuple[int, ...]) -> DynamicCache:
        return copy.deepcopy(self._prefill(token_ids))

    @cache  # noqa: B019 one object, one module
    def _prefill(self, token_ids: tuple[int, ...]) -> DynamicCache:
        kv = self.model(input_ids=torch.tensor([token_ids]), use_cache=True).past_key_values
        assert isinstance(kv, DynamicCache)
        return kv

    def share_right(self, names: set[str], edit: Edit, num_given: int = 0) -> float:
        prompts = [p for s in PROMPT_SEEDS for p in demo_prompts(s) if p.name in names]
        right = [self.decode(p, edit, num_given) == answer_ids(p) for p in prompts]
        return sum(right) / len(right)


def answer_ids(prompt: DemoPrompt) -> list[int]:
    return [WORD_IDS[word] for word in [*prompt.expected.split(), EOS]]


def nothing(trained: Trained, kv: DynamicCache, ids: list[int], prompt: DemoPrompt) -> None:
    pass


def _zero(kv: DynamicCache, layers: list[int], positions: range, num_sent: int) -> None:
    for layer in layers:
        held: Any = kv.layers[layer]
        keys, values = held.keys, held.values
        first = num_sent - keys.shape[2]  # a sliding layer keeps only the window's positions
        for position in positions:
            if position >= first:
                keys[:, :, position - first] = 0
                values[:, :, position - first] = 0


def record_blocks(trained: Trained, kv: DynamicCache, ids: list[int], prompt: DemoPrompt) -> None:
    """Zero the full-attention blocks that hold the record asked about."""
    start = ids.index(WORD_IDS[prompt.key])
    end = ids.index(WORD_IDS[";"], start) + 1
    _zero(kv, trained.full, _blocks(start, end), kv.get_seq_length(trained.full[0]))


def other_blocks(trained: Trained, kv: DynamicCache, ids: list[int], prompt: DemoPrompt) -> None:
    """Zero as many full-attention blocks elsewhere: the first two that do not touch the record."""
    start = ids.index(WORD_IDS[prompt.key])
    end = ids.index(WORD_IDS[";"], start) + 1
    own = _blocks(start, end)
    at = 0 if own.start >= 2 * BLOCK_TOKENS else own.stop
    num_sent = kv.get_seq_length(trained.full[0])
    _zero(kv, trained.full, range(at, at + 2 * BLOCK_TOKENS), num_sent)


def window(trained: Trained, kv: DynamicCache, ids: list[int], prompt: DemoPrompt) -> None:
    """Zero what the sliding layers hold: every position in the window."""
    num_sent = kv.get_seq_length(trained.full[0])
    _zero(kv, trained.sliding, range(num_sent - WINDOW_TOKENS, num_sent), num_sent)


def _blocks(start: int, end: int) -> range:
    return range(start // BLOCK_TOKENS * BLOCK_TOKENS, -(-end // BLOCK_TOKENS) * BLOCK_TOKENS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    made = make_checkpoint(out, 0, RECIPE, Console(file=printed))
    assert made is not None, printed.getvalue()
    return Trained(out)


ALL = {p.name for p in demo_prompts(0)}
DELAYED = {"delayed", "long-delay", "prefix-first", "prefix-second", "chat-1", "chat-2"}


@pytest.mark.parametrize("name", sorted(ALL))
def test_answers_exactly(trained: Trained, name: str) -> None:
    assert trained.share_right({name}, nothing) >= 0.9


def test_generate_stops_by_itself(trained: Trained) -> None:
    prompt = demo_prompts(0)[0]
    ids = torch.tensor([prompt_token_ids(trained.tokenizer, prompt)])
    model: Any = trained.model
    generated = model.generate(ids)[0, ids.shape[1] :].tolist()
    assert generated == trained.decode(prompt, nothing, 0)
    assert generated[-1] == WORD_IDS[EOS]


@pytest.mark.parametrize("num_given", [0, 1])
def test_answer_needs_the_far_record(trained: Trained, num_given: int) -> None:
    assert trained.share_right(ALL, nothing, num_given) >= 0.9
    assert trained.share_right(ALL, record_blocks, num_given) <= 0.1
    assert trained.share_right(ALL, other_blocks, num_given) >= 0.8


def test_delayed_answer_needs_the_window(trained: Trained) -> None:
    assert trained.share_right(DELAYED, window) <= 0.1


def test_rest_of_an_answer_needs_the_window(trained: Trained) -> None:
    """Given the first value, the window should still tell the joining word.

    A weaker proof: full attention finds that word too, in a share of prompts that differs from
    seed to seed (0.04 to 0.45 of the answers survived).
    """
    assert trained.share_right(ALL, window, num_given=1) <= 0.7
