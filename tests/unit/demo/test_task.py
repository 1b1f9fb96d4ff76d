from random import Random

import pytest

from demo.model import WINDOW_TOKENS
from demo.prompts import NUM_RECORDS, demo_prompts
from demo.task import (
    BOS,
    EOS,
    JOINERS,
    KEYS,
    PAD,
    VALUES,
    VOCABULARY,
    WORD_IDS,
    Difficulty,
    Question,
    Record,
    draw_records,
    draw_sequence,
    to_text,
)
from demo.tokenizer import build_tokenizer
from demo.training import prompt_token_ids

TOKENIZER = build_tokenizer(2048)


def test_every_word_is_one_token_and_none_is_unknown() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    words = [word for r in draw_records(Random(1), 32, 128, 200) for word in r.words()]
    words += Question(Record("redfox=", ("7", "41")), "plus", 3).words()
    expected = [WORD_IDS[word] for word in [BOS, *words]]
    assert TOKENIZER(to_text(words)).input_ids == expected
    assert TOKENIZER(" ".join(words)).input_ids == expected
    # Negative control: a word outside the task is the unknown token, not silently dropped.
    assert TOKENIZER("redfox=7 elephant").input_ids[-1] == TOKENIZER.unk_token_id


def test_answer_joins_the_values_by_the_word_asked_for() -> None:
    question = Question(Record("redfox=", ("7", "41", "12")), "or", 2)
    assert to_text(question.words()) == "? or redfox= . ."
    assert to_text([*question.record.words(), "?"]) == "redfox=7 41 12; ?"
    assert to_text(question.answer()) == "7 or 41 or 12"


@pytest.mark.parametrize("asks_plainly", [True, False])
def test_labels_are_the_records_in_the_document(asks_plainly: bool) -> None:
    for seed in range(50):
        size = Difficulty(8, 32, 48, 6, 3, asks_plainly)
        words, labels = draw_sequence(Random(seed), size, 8)
        assert len(words) == len(labels)
        joiners = set(JOINERS)
        for index, (word, label) in enumerate(zip(words, labels, strict=True)):
            if label == EOS:
                assert words[index + 1] == EOS, f"seed {seed}"
            if word in KEYS and label != PAD:
                # Asked: what must follow is what followed the key in the document.
                assert label == words[words.index(word) + 1], f"seed {seed}"
            if label in VALUES and word in joiners:
                previous = words.index(words[index - 1])
                assert label == words[previous + 1], f"seed {seed}"


def test_chat_template_gives_the_trained_turns() -> None:
    messages = [
        {"role": "user", "content": "redfox=7 41; ? plus redfox="},
        {"role": "assistant", "content": "7 plus 41"},
        {"role": "user", "content": "? or redfox= ."},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    words = TOKENIZER.convert_ids_to_tokens(TOKENIZER(text, add_special_tokens=False).input_ids)
    assert " ".join(words) == (
        "<bos> <user> redfox= 7 41 ; ? plus redfox= <assistant> 7 plus 41 <eos> "
        "<user> ? or redfox= . <assistant>"
    )


def test_demo_prompts_are_long_far_and_share_prefixes() -> None:
    prompts = demo_prompts(3)
    assert prompts == demo_prompts(3)
    assert prompts != demo_prompts(4)
    by_name = {prompt.name: prompt for prompt in prompts}
    assert len(by_name) == len(prompts)
    for prompt in prompts:
        token_ids = prompt_token_ids(TOKENIZER, prompt)
        assert TOKENIZER.unk_token_id not in token_ids
        assert token_ids.count(TOKENIZER.bos_token_id) == 1
        assert len(token_ids) >= 8 * WINDOW_TOKENS
        far = token_ids.index(WORD_IDS[prompt.key])
        assert far < len(token_ids) - 2 * WINDOW_TOKENS
        if prompt.follows:
            earlier = prompt_token_ids(TOKENIZER, by_name[prompt.follows])
            shared = sum(a == b for a, b in zip(earlier, token_ids, strict=False))
            assert shared >= 3 * NUM_RECORDS
            assert prompt.expected != by_name[prompt.follows].expected
    # The second turn continues exactly the tokens of the first turn and its generated answer.
    first, second = by_name["chat-1"], by_name["chat-2"]
    first_ids = prompt_token_ids(TOKENIZER, first)
    generated = [WORD_IDS[word] for word in [*first.expected.split(), EOS]]
    assert prompt_token_ids(TOKENIZER, second)[: len(first_ids) + len(generated)] == (
        first_ids + generated
    )
