"""What the demo draws of tiers: computed, loaded, out of the window."""

import io

import pytest
from rich.console import Console

from demo.asking import Answer
from demo.model import WINDOW_TOKENS
from demo.prompts import LONG_TRIES_MAX, DemoPrompt, long_prompts
from demo.tier_drawing import BLOCK_TOKENS, Load, draw_load
from demo.tokenizer import build_tokenizer
from demo.training import prompt_token_ids


def answer_with(hit_tokens: int, num_prompt_tokens: int = 85) -> Answer:
    prompt = DemoPrompt("long-1", "completion", "? plus redfox=", (), "7", "redfox=")
    record = {"generations": [{"hit_tokens": hit_tokens}]}
    return Answer(prompt, "7", num_prompt_tokens, 1, 12.0, 1.0, record)


def test_what_was_not_there_is_drawn_as_computed() -> None:
    load = Load.of(answer_with(0), {"tier_blocks_written": 20.0})
    assert load.maps == {"window 16": "c" * 11, "full": "c" * 11}
    assert (load.num_loaded, load.num_read, load.num_written) == (0, 0, 20)


def test_of_a_window_only_what_is_seen_is_drawn_as_loaded() -> None:
    counts = {"tier_blocks_read": 12.0, "tier_read_seconds": 0.003}
    load = Load.of(answer_with(80), counts)
    assert load.maps == {"window 16": "........llc", "full": "llllllllllc"}
    assert (load.num_loaded, load.num_read, load.read_ms) == (12, 12, 3.0)


@pytest.mark.parametrize(("said", "shown"), [("7", "same as one process"), ("8", "says 8")])
def test_another_answer_is_shown(said: str, shown: str) -> None:
    out = io.StringIO()
    load = Load.of(answer_with(80), {"tier_blocks_read": 12.0})
    Console(file=out, width=100).print(draw_load(answer_with(80), said, "again", load))
    assert shown in out.getvalue()
    assert "80 tokens loaded: 12 blocks" in out.getvalue()


def test_long_prompts_are_those_that_are_known() -> None:
    tried: list[DemoPrompt] = []

    def is_known(prompt: DemoPrompt) -> bool:
        tried.append(prompt)
        return len(tried) % 3 == 0

    found = long_prompts(0, is_known)
    assert found == (tried[2], tried[5])
    tokenizer = build_tokenizer(2048)
    for prompt in found:
        num_tokens = len(prompt_token_ids(tokenizer, prompt))
        # Neither fits the pool of 119 blocks with its window in full, nor both without.
        assert 2 * (num_tokens // BLOCK_TOKENS) > 119
        assert num_tokens // BLOCK_TOKENS + WINDOW_TOKENS < 119
    with pytest.raises(ValueError, match=f"0 of {LONG_TRIES_MAX}"):
        long_prompts(0, lambda prompt: False)
