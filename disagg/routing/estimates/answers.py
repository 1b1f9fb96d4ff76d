"""Answers that are decoded at a worker, one by one, and which of them a plan makes late."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation
from disagg.routing.estimates.by_worker import ByWorker
from disagg.routing.slo import Slo, missed

ANSWERS_MAX = 32
"""Of one worker that are looked at one by one; those beyond are like an average answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One that a worker gives, or will give once its prompt is computed; tokens after its first."""

    num_tokens: int
    """That it has."""
    num_left: float
    """That are expected."""
    took_ms: float
    """Those that it has."""
    slo_tpot_ms: float = 0.0
    """Its own bound; 0: that of all."""
    has_begun: bool = True
    begins_ms: float = 0.0
    """Until its first token is where it is decoded, as it was planned."""
    num_alike: int = 1
    """Answers of which this is said."""

    def tpot_ms(self, steps: "Steps") -> float:
        """Time per token of all of it."""
        pause_ms = steps.pause_ms
        if not self.has_begun:
            pause_ms = min(steps.new_pause_ms, max(0.0, steps.new_until_ms - self.begins_ms))
        num = max(1.0, self.num_tokens + self.num_left)
        return (self.took_ms + self.num_left * steps.step_ms + pause_ms) / num


@dataclass(frozen=True, slots=True)
class Steps:
    """A worker's decode steps, and what it computes of prompts between them."""

    step_ms: float
    pause_ms: float
    """Once for each answer that has begun."""
    new_pause_ms: float = 0.0
    """Of that, once for each that has not: its own prompt is no pause."""
    new_until_ms: float = 0.0
    """Until that is done: who begins later is not held up by it."""


def num_made_late(
    answers: Iterable[Answer], slo_tpot_ms: float, before: Steps, after: Steps
) -> float:
    """How many answers miss their bounds by a plan; each counts as far as it is in time without.

    Args:
        answers: of a worker.
        slo_tpot_ms: bound of those without an own one; 0: none.
        before: its steps without the plan.
        after: with it.
    """
    num = 0.0
    for one in answers:
        bound_ms = one.slo_tpot_ms or slo_tpot_ms
        if not bound_ms:
            continue
        old, new = (one.tpot_ms(steps) / bound_ms for steps in (before, after))
        num += one.num_alike * missed(new) * (1 - missed(old))
    return num


class Answering(Protocol):
    """A request as far as its answer goes."""

    request_id: str
    slo: Slo
    first_token_ms: int | None
    num_tokens: int

    @property
    def expected_ms(self) -> float:
        """When its first token should be where it is decoded; 0: nobody knows."""
        ...

    @property
    def num_tokens_left(self) -> int:
        """That it may still get."""
        ...


class Answers:
    """The answers of this router's requests, by who decodes them."""

    def __init__(self) -> None:
        self._requests = ByWorker[Answering]()

    def begin(self, worker: Incarnation, request: Answering) -> None:
        """A request's answer will be decoded there, and nowhere else from now on."""
        self._requests.put(worker, request.request_id, request)

    def end(self, request_id: str) -> None:
        """A request has ended; unknown ones are ignored."""
        self._requests.drop(request_id)

    def at(self, now_ms: int, worker: Incarnation, mean_tokens: float) -> tuple[Answer, ...]:
        """Those of a worker, the oldest first, `ANSWERS_MAX` at most.

        Args:
            now_ms: the time.
            worker: which.
            mean_tokens: of an answer; so many are still expected of each, if it may have as many.
        """
        return tuple(self._answers(now_ms, self._requests.at(worker), mean_tokens))

    def _answers(
        self, now_ms: int, there: Iterable[Answering], mean_tokens: float
    ) -> Iterator[Answer]:
        for one in islice(there, ANSWERS_MAX):
            first_ms, num_left = one.first_token_ms, min(one.num_tokens_left, mean_tokens)
            if first_ms is None:
                begins_ms = max(0.0, one.expected_ms - now_ms)
                num_left = max(1.0, num_left - 1)
                yield Answer(0, num_left, 0.0, one.slo.tpot_ms, False, begins_ms)
            else:
                yield Answer(
                    one.num_tokens - 1, max(1.0, num_left), now_ms - first_ms, one.slo.tpot_ms
                )
