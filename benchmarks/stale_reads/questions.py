"""Prompts whose one right answer lies far back in them, and the count of what was answered."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from demo.task import BOS, EOS, JOINERS, KEYS, VALUES, WORD_IDS, Question, Record

NUM_RECORDS = 36
NUM_DOTS = 3
"""Between question and answer: which key was asked is then known inside the window only."""
VALUES_ASKED = VALUES[: len(VALUES) // 2]
VALUES_OF_OTHERS = VALUES[len(VALUES) // 2 :]
"""In the prompts that reuse blocks: a value of these in an answer is another user's."""
MARGIN_MIN = 1.0
"""Between the two best logits of every token of an answer: no rounding decides."""
MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    token_ids: tuple[int, ...]
    answer: str
    """Words of the only right answer, without blanks."""

    def body(self, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """The request for OpenAI's completions, both systems'."""
        return {"prompt": list(self.token_ids), "max_tokens": max_tokens, "temperature": 0.0}


def draw_prompt(rng: Random, values: tuple[str, ...]) -> Prompt:
    """A document of records and a question about one that is far from its end.

    Every prompt has 169 tokens: its last window begins in a block before the last, whether blocks
    have 16 or 32 tokens, so that what a worker got of it is found in its prefix cache again.
    """
    lengths = rng.sample((2, 3) * (NUM_RECORDS // 2), NUM_RECORDS)
    left = iter(rng.sample(values, sum(lengths)))
    records = [
        Record(key, tuple(next(left) for _ in range(length)))
        for key, length in zip(rng.sample(KEYS, NUM_RECORDS), lengths, strict=True)
    ]
    asked = rng.choice(records[: NUM_RECORDS * 3 // 4])
    question = Question(asked, rng.choice(JOINERS), NUM_DOTS)
    words = [BOS, *(word for record in records for word in record.words()), *question.words()]
    return Prompt(tuple(WORD_IDS[word] for word in words), "".join(question.answer()))


class Prompts:
    """Draws prompts, each once; of every row the same ones in the same order for every system.

    What is asked has an answer that the model, run by plain transformers, gives clearly.
    """

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._rngs: dict[str, Random] = {}

    def asked(self, row: str, num: int) -> list[Prompt]:
        """The next prompts of a row, which will be asked and judged."""
        rng = self._rngs.setdefault(row, Random(f"stale reads, {row}"))
        found: list[Prompt] = []
        while len(found) < num:
            prompt = draw_prompt(rng, VALUES_ASKED)
            if self._is_clear(prompt):
                found.append(prompt)
        return found

    def others(self, num: int) -> list[Prompt]:
        """The next prompts of other users, which make the owner use its blocks again."""
        rng = self._rngs.setdefault("", Random("stale reads, other users"))
        return [draw_prompt(rng, VALUES_OF_OTHERS) for _ in range(num)]

    @torch.no_grad()
    def _is_clear(self, prompt: Prompt) -> bool:
        answer = [WORD_IDS[word] for word in re.findall(r"\d+|[a-z]+", prompt.answer)]
        answer.append(WORD_IDS[EOS])
        token_ids = torch.tensor([[*prompt.token_ids, *answer]])
        logits = self._model(input_ids=token_ids, use_cache=False).logits[0]
        best = logits[len(prompt.token_ids) - 1 : -1].topk(2)
        is_right = best.indices[:, 0].tolist() == answer
        margin: float = (best.values[:, 0] - best.values[:, 1]).min().item()
        return is_right and margin > MARGIN_MIN


@dataclass(slots=True)
class Tally:
    """What came of the requests of one row."""

    right: int = 0
    wrong: int = 0
    """Status 200 and another answer."""
    errors: int = 0
    of_others: int = 0
    """Wrong answers with a value that only other users' prompts contain."""
    causes: Counter[str] = field(default_factory=Counter)
    """Why a hand-over was given up, or what the error was."""
    ends: int = 0
    """Workers that ended by themselves."""

    @property
    def rounds(self) -> int:
        """Requests asked."""
        return self.right + self.wrong + self.errors

    def answered(self, prompt: Prompt, text: str) -> None:
        """Judge an answer that came with status 200."""
        if text.replace(" ", "") == prompt.answer:
            self.right += 1
            return
        self.wrong += 1
        self.of_others += any(word in VALUES_OF_OTHERS for word in re.findall(r"\d+", text))

    def failed(self, cause: str) -> None:
        """Count a request that ended in an error."""
        self.errors += 1
        self.causes[cause] += 1

    def add(self, other: "Tally") -> None:
        """Take in another tally of the same row."""
        self.right += other.right
        self.wrong += other.wrong
        self.errors += other.errors
        self.of_others += other.of_others
        self.causes += other.causes
        self.ends += other.ends

    def counts(self) -> dict[str, Any]:
        """For a JSON line."""
        return {
            "rounds": self.rounds,
            "right": self.right,
            "wrong": self.wrong,
            "wrong_with_others_values": self.of_others,
            "errors": self.errors,
            "causes": dict(self.causes),
            "workers_ended": self.ends,
        }


@dataclass(slots=True)
class Row:
    """What came of one row's requests, and of the same prompts asked again afterwards."""

    faulty: Tally = field(default_factory=Tally)
    again: Tally = field(default_factory=Tally)
