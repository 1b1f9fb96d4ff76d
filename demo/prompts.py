"""The demo's prompts: completions, a shared prefix, and a chat of two turns."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from demo.task import JOINERS, KEYS, VALUES, Question, Record, draw_records, to_text

NUM_RECORDS = 32  # about 165 tokens: ten windows
LONG_DOCUMENTS, NUM_LONG, LONG_TRIES_MAX = 4, 2, 30


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One request of the demo, and the answer that proves the KV arrived.

    Attributes:
        name: short and unique within one list.
        kind: which endpoint it is for.
        text: the prompt of a completion, "" for a chat.
        messages: (role, content) of each chat message so far, () for a completion.
        expected: the whole answer; the model ends it with its end-of-sequence token.
        key: the word asked about, such as ``redfox=``; it stands twice or more in the prompt, and
            its first place is the far one.
        follows: name of the earlier prompt whose KV prefix this one can reuse, "" when none.
    """

    name: str
    kind: Literal["completion", "chat"]
    text: str
    messages: tuple[tuple[str, str], ...]
    expected: str
    key: str
    follows: str = ""


def demo_prompts(seed: int) -> list[DemoPrompt]:
    """Draw the demo's requests; the same seed gives the same list, in the order to send them.

    Each prompt is at least eight sliding windows long and asks about a record that has left the
    window long ago.
    """
    rng = Random(f"demo prompts {seed}")
    prompts = [
        _completion(rng, "direct", _draw_document(rng), num_dots=0),
        _completion(rng, "delayed", _draw_document(rng), num_dots=4),
        _completion(rng, "long-delay", _draw_document(rng), num_dots=10),
    ]
    shared = _draw_document(rng)
    first, second = rng.sample(_far(shared), 2)
    prompts += [
        _completion(rng, "prefix-first", shared, num_dots=3, record=first),
        _completion(
            rng, "prefix-second", shared, num_dots=3, record=second, follows="prefix-first"
        ),
    ]
    return prompts + _chat(rng)


def long_prompts(seed: int, is_known: Callable[[DemoPrompt], bool]) -> tuple[DemoPrompt, ...]:
    """Draw two prompts several documents long that the model knows the answer to.

    It has not learnt such lengths, so it does not know every one: ``is_known`` tries them.

    Raises:
        ValueError: it knows less than two of many.
    """
    rng = Random(f"long prompts {seed}")
    known: list[DemoPrompt] = []
    for _ in range(LONG_TRIES_MAX):
        documents = [_draw_document(rng) for _ in range(LONG_DOCUMENTS)]
        question = Question(rng.choice(_far(documents[-1])), rng.choice(JOINERS), 3)
        words = [word for document in documents for word in _document_words(document)]
        text, expected = (
            to_text(words) for words in ([*words, *question.words()], question.answer())
        )
        prompt = DemoPrompt(
            f"long-{len(known) + 1}", "completion", text, (), expected, question.record.key
        )
        if is_known(prompt):
            known.append(prompt)
            if len(known) == NUM_LONG:
                return tuple(known)
    raise ValueError(f"the model knows {len(known)} of {LONG_TRIES_MAX} long prompts")


def _draw_document(rng: Random) -> list[Record]:
    return draw_records(rng, NUM_RECORDS, len(KEYS), len(VALUES))


def _far(document: list[Record]) -> list[Record]:
    return document[: NUM_RECORDS * 3 // 4]


def _document_words(document: list[Record]) -> list[str]:
    return [word for record in document for word in record.words()]


def _completion(
    rng: Random,
    name: str,
    document: list[Record],
    *,
    num_dots: int,
    record: Record | None = None,
    follows: str = "",
) -> DemoPrompt:
    question = Question(record or rng.choice(_far(document)), rng.choice(JOINERS), num_dots)
    text = to_text([*_document_words(document), *question.words()])
    expected = to_text(question.answer())
    return DemoPrompt(name, "completion", text, (), expected, question.record.key, follows)


def _chat(rng: Random) -> list[DemoPrompt]:
    document = _draw_document(rng)
    first, second = (Question(r, rng.choice(JOINERS), 3) for r in rng.sample(_far(document), 2))
    opening = ("user", to_text([*_document_words(document), *first.words()]))
    answers = [to_text(question.answer()) for question in (first, second)]
    turns = (opening, ("assistant", answers[0]), ("user", to_text(second.words())))
    return [
        DemoPrompt("chat-1", "chat", "", turns[:1], answers[0], first.record.key),
        DemoPrompt("chat-2", "chat", "", turns, answers[1], second.record.key, follows="chat-1"),
    ]
