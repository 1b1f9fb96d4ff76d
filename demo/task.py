"""The look-up task the demo's model learns, as words.

A document is a list of records; then questions are asked about them::

    redfox=7 41 12 3; bluebee=90 5; ... ? plus redfox= . . .      ->  7 plus 41 plus 12 plus 3 <eos>

To answer, the model must fetch from far away (only full attention reaches the record) and from the
last few tokens (only the sliding window knows, at a dot, which key was asked; after ``plus``, which
value was said last; after the first value, which joining word was asked for).

Everything here is a list of words: joined by blanks they are the prompt's text, one by one they are
the tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

PAD, BOS, EOS, UNK, USER, ASSISTANT = "<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"
SPECIAL = (PAD, BOS, EOS, UNK, USER, ASSISTANT)
ASK, DOT, END = "?", ".", ";"
JOINERS = ("then", "plus", "and", "or", "with", "over", "by", "to")

# fmt: off
_COLOURS = (
    "red", "blue", "green", "pink", "gold", "grey", "teal", "lime",
    "rust", "plum", "navy", "jade", "ruby", "mint", "sand", "onyx",
)
# fmt: on
_ANIMALS = ("fox", "bee", "owl", "elk", "cat", "dog", "ant", "bat")
KEYS = tuple(f"{colour}{animal}=" for animal in _ANIMALS for colour in _COLOURS)
VALUES = tuple(str(number) for number in range(200))

VOCABULARY = (*SPECIAL, ASK, DOT, END, *JOINERS, *KEYS, *VALUES)
WORD_IDS = {word: index for index, word in enumerate(VOCABULARY)}


@dataclass(frozen=True, slots=True)
class Record:
    """One key with its values, all of them words of the vocabulary."""

    key: str
    values: tuple[str, ...]

    def words(self) -> list[str]:
        """The record's words in a document."""
        return [self.key, *self.values, END]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one record: which joining word, and how many dots before the answer."""

    record: Record
    joiner: str
    num_dots: int

    def words(self) -> list[str]:
        """The question's words in a document."""
        return [ASK, self.joiner, self.record.key, *[DOT] * self.num_dots]

    def answer(self) -> list[str]:
        """The right answer, without the end-of-sequence word."""
        words = [self.record.values[0]]
        for value in self.record.values[1:]:
            words += [self.joiner, value]
        return words


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How large the task is: of which words, and how long.

    ``asks_plainly`` leaves out chat turns, dots and joining words, and records have one or two
    values instead of two to four: the answer is then the bare copy of a short record, the easiest
    form of the task. (With long records the step from key to first value is rare and comes late.)
    """

    num_records: int
    num_keys: int
    num_values: int
    num_questions: int
    dots_max: int
    asks_plainly: bool = False


def to_text(words: Sequence[str]) -> str:
    """Join words to the prompt a person would write; the tokenizer takes it apart again."""
    return re.sub(r"= (?=\d)", "=", " ".join(words)).replace(f" {END}", END)


def draw_records(
    rng: Random, num_records: int, num_keys: int, num_values: int, lengths: range = range(2, 5)
) -> list[Record]:
    """Draw records, each of as many values as one of ``lengths``; no word occurs twice."""
    keys = rng.sample(KEYS[:num_keys], num_records)
    num_each = [rng.choice(lengths) for _ in keys]
    values = iter(rng.sample(VALUES[:num_values], sum(num_each)))
    return [
        Record(key, tuple(next(values) for _ in range(length)))
        for key, length in zip(keys, num_each, strict=True)
    ]


def draw_sequence(rng: Random, size: Difficulty, num_records: int) -> tuple[list[str], list[str]]:
    """Draw one training sequence and its labels.

    Returns:
        ``words`` and ``labels`` of equal length: ``labels[i]`` is the word that must follow
        ``words[i]``, or ``PAD`` where nothing is asked. Every dot is labelled with the answer's
        first word, although another dot follows it: so one sequence teaches every delay.
    """
    lengths = range(1, 3) if size.asks_plainly else range(2, 5)
    records = draw_records(rng, num_records, size.num_keys, size.num_values, lengths)
    words = [BOS, *[USER] * rng.randint(0, 1)]
    for record in records:
        words += record.words()
    labels = [PAD] * len(words)
    for _ in range(size.num_questions):
        record = rng.choice(records)
        if size.asks_plainly:
            prompt, answer = [ASK, record.key], list(record.values)
        else:
            in_chat = rng.random() < 0.5
            num_dots = 0 if rng.random() < 0.3 else rng.randint(1, size.dots_max)
            question = Question(record, rng.choice(JOINERS), num_dots)
            prompt = [*[USER] * in_chat, *question.words(), *[ASSISTANT] * in_chat]
            answer = question.answer()
        at_key = prompt.index(record.key)
        words += [*prompt, *answer, EOS]
        labels += [PAD] * at_key + [answer[0]] * (len(prompt) - at_key) + [*answer[1:], EOS, PAD]
    return words, labels
