"""A server's memory played through: prompts in chunks side by side, answers, preemption.

The same for both systems, and without anything of either.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.retention.workloads import Request

ALIVE_MAX = 8
STEP_TOKENS = 2048
ANSWER_TOKENS = 32
"""Tokens of an answer per step: many steps at once, which changes nothing for a cache."""


class Cache(Protocol):
    """A KV cache without the KV."""

    def begin(self, number: int, request: Request) -> int | None:
        """Take a request in; returns the tokens of its prompt that it found, None: no room now."""

    def compute(self, number: int, num_new: int) -> bool:
        """Compute further tokens of its prompt; False: no room now."""

    def answer(self, number: int, num_new: int) -> bool:
        """Compute further tokens of its answer; False: no room now."""

    def end(self, number: int) -> None:
        """Give its blocks back."""


@dataclass(frozen=True)
class Played:
    """What was found, of how many, and what it cost."""

    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    """Of prompts, those computed again after a preemption included."""
    preemptions: int

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that was found."""
        return self.hit_tokens / self.prompt_tokens


@dataclass(eq=False)
class _Run:
    number: int
    request: Request
    done: int
    answered: int = 0

    @property
    def left(self) -> int:
        return len(self.request.prompt) - self.done


def replay(cache: Cache, requests: Sequence[Request]) -> Played:
    """Serve the requests in their order, as many at once as there may be and is room for."""
    waiting = deque(enumerate(requests))
    running: list[_Run] = []
    found: dict[int, int] = {}
    computed = preemptions = 0

    def preempt() -> None:
        nonlocal preemptions
        youngest = running.pop()
        cache.end(youngest.number)
        waiting.appendleft((youngest.number, youngest.request))
        preemptions += 1

    while waiting or running:
        while waiting and len(running) < ALIVE_MAX:
            number, request = waiting[0]
            hit = cache.begin(number, request)
            if hit is None:
                if not running:
                    raise ValueError(f"request {number} does not fit an empty cache")
                break
            waiting.popleft()
            found.setdefault(number, hit)
            running.append(_Run(number, request, hit))
        for run in running.copy():
            if run not in running or run.left:
                continue
            new = min(ANSWER_TOKENS, run.request.num_answer - run.answered)
            while run in running and not cache.answer(run.number, new):
                preempt()
            run.answered += new
        prompts = [run for run in running if run.left]
        share = STEP_TOKENS // max(1, len(prompts))
        for run in prompts:
            new = min(share, run.left)
            while run in running and not cache.compute(run.number, new):
                preempt()
            if run in running:
                run.done += new
                computed += new
        for run in running.copy():
            if not run.left and run.answered >= run.request.num_answer:
                running.remove(run)
                cache.end(run.number)
    return Played(
        sum(len(request.prompt) for request in requests), sum(found.values()), computed, preemptions
    )
