"""Several hundred questions to the demo's model, whose answers lie far back in the prompt."""

from collections.abc import Iterator
from itertools import islice
from random import Random

from benchmarks.accuracy.task import Item
from demo.task import JOINERS, KEYS, VALUES, Question, Record, draw_records, to_text

NUM_RECORDS = 32
NUM_DOCUMENTS = (1, 1, 1, 4)
"""Of a prompt, in turn: what the model has learnt, about 170 tokens, and 650, where it is often
wrong, as both have to be the same everywhere."""
NUM_QUESTIONS = 5
"""About each of them: the beginnings of their prompts are equal."""
DOTS_MAX = 8
"""The longest delay between question and answer: the key is known inside the window only."""
NUM_CHOICES = 4
MAX_TOKENS = 32
"""More than an answer has, so that each ends by itself: lm-eval's own process does not stop where
a server does."""


def draw_items(num: int, seed: int = 0) -> list[Item]:
    """Draw items; the same ones for the same arguments."""
    return list(islice(_items(Random(f"accuracy {seed}")), num))


def _items(rng: Random) -> Iterator[Item]:
    while True:
        for num_documents in NUM_DOCUMENTS:
            documents = [
                draw_records(rng, NUM_RECORDS, len(KEYS), len(VALUES)) for _ in range(num_documents)
            ]
            words = [word for document in documents for one in document for word in one.words()]
            far = documents[-1][: NUM_RECORDS * 3 // 4]
            for record in rng.sample(far, NUM_QUESTIONS):
                yield _item(rng, words, documents[-1], record)


def _item(rng: Random, words: list[str], document: list[Record], record: Record) -> Item:
    joiner, num_dots = rng.choice(JOINERS), rng.randint(0, DOTS_MAX)
    others = rng.sample([one for one in document if one is not record], NUM_CHOICES - 1)
    answers = [to_text(Question(one, joiner, 0).answer()) for one in (record, *others)]
    choices = rng.sample(answers, NUM_CHOICES)
    prompt = to_text([*words, *Question(record, joiner, num_dots).words()])
    return Item(prompt, answers[0], tuple(choices))
