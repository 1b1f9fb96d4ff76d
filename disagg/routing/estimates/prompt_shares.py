"""What share of a worker's time will go to prompts, by what it and its kind lately computed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import log

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.routing.estimates.estimate import Estimate
from disagg.routing.estimates.place import NO_LONG_PROMPTS, LongPrompts, StepCost

SHARE_HALF_LIFE_MS = 5_000
"""Longer than most answers, shorter than most shifts."""
PLANNED_KEEPS = 0.9
"""Of the sums over prompts that went to a worker, with each one more."""
WAITING_MAX = 8
"""Prompts that wait for a worker and are looked at; a long one of them is enough."""


@dataclass(slots=True)
class _Computed:
    """Tokens of prompts and their context; old ones fade with time."""

    tokens: float = 0.0
    context: float = 0.0
    until_ms: int = 0
    """They have faded until then."""

    def add(self, now_ms: int, tokens: float, context: float) -> None:
        self._fade(now_ms)
        self.tokens += tokens
        self.context += context

    def share(self, now_ms: int, cost: StepCost) -> float:
        """Of a worker's time that they have taken, if one has computed all of them."""
        self._fade(now_ms)
        prompts_ms = self.tokens * cost.token_ms + self.context * cost.context_token_ms
        return prompts_ms * log(2) / SHARE_HALF_LIFE_MS

    def _fade(self, now_ms: int) -> None:
        if now_ms <= self.until_ms:  # several of a worker's plans ask at one moment
            return
        kept = 0.5 ** ((now_ms - self.until_ms) / SHARE_HALF_LIFE_MS)
        self.tokens, self.context = kept * self.tokens, kept * self.context
        self.until_ms = now_ms


@dataclass(slots=True)
class _Kind:
    """All workers of one revision and role."""

    num_workers: int = 0
    short: _Computed = field(default_factory=_Computed)


@dataclass(slots=True)
class _Known:
    kind: tuple[str, str]
    long: _Computed = field(default_factory=_Computed)
    planned_ms: float = 0.0
    stalls_ms: float = 0.0
    num_stalls: float = 0.0

    @property
    def stall_share(self) -> float:
        """`Estimate.stall_share` of what went there lately; all of it while nothing is known."""
        return self.stalls_ms / self.planned_ms if self.planned_ms else 1.0

    @property
    def long_ms(self) -> float:
        """What one of the prompts takes, each counting as far as it is long; 0: not known."""
        return self.stalls_ms / self.num_stalls if self.num_stalls else 0.0


class PromptShares:
    """Long prompts are expected again where they were computed, short ones at all of a kind alike.

    Who lately computed long prompts is best left to those to come, and spares answers elsewhere of
    them. Short ones hardly stall an answer: to expect them where they were would part workers into
    those with all prompts and those with all answers, for nothing. How long they were the router
    knows of what it has planned itself; what others' were is taken to be alike.
    """

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Known] = {}
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def planned(self, worker: Incarnation, estimate: Estimate) -> None:
        """A prompt goes to a worker."""
        known = self._workers.get(worker)
        if known is not None:
            took_ms = estimate.prefill_ms
            known.planned_ms = PLANNED_KEEPS * known.planned_ms + took_ms
            known.stalls_ms = PLANNED_KEEPS * known.stalls_ms + took_ms * estimate.stall_share
            known.num_stalls = PLANNED_KEEPS * known.num_stalls + estimate.stall_share

    def computed(self, now_ms: int, worker: WorkerInfo, tokens: float, context: float) -> None:
        """A worker has computed more of prompts: tokens, and their products with what is before.

        The first figures of a life only say that the worker is there: they may be of any time.
        """
        kind = worker.revision, worker.role
        known = self._workers.get(worker.incarnation)
        if known is None:
            self._workers[worker.incarnation] = _Known(kind)
            self._join(kind)
            return
        if known.kind != kind:  # another role from now on
            self._leave(known.kind)
            self._join(kind)
            known.kind = kind
        stalls = known.stall_share
        known.long.add(now_ms, stalls * tokens, stalls * context)
        self._kinds[kind].short.add(now_ms, (1 - stalls) * tokens, (1 - stalls) * context)

    def forget(self, worker: Incarnation) -> None:
        """A worker has left."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._leave(known.kind)

    def share(self, now_ms: int, worker: WorkerInfo, cost: StepCost) -> float:
        """Of a worker's time to come, 0 to 1.

        Args:
            now_ms: the time.
            worker: which.
            cost: of its steps.
        """
        known = self._workers.get(worker.incarnation)
        if known is None:
            return 0.0
        kind = self._kinds[known.kind]
        short = kind.short.share(now_ms, cost) / kind.num_workers
        return min(1.0, known.long.share(now_ms, cost) + short)

    def long_prompts(
        self, now_ms: int, worker: WorkerInfo, cost: StepCost, waiting: Iterable[Estimate] = ()
    ) -> LongPrompts:
        """The long ones among the prompts to come at a worker.

        Args:
            now_ms: the time.
            worker: which.
            cost: of its steps.
            waiting: plans of those that wait at the router, as of now to be computed there.
        """
        known = self._workers.get(worker.incarnation)
        if known is None:
            return NO_LONG_PROMPTS
        none, waiting_ms = 1.0, 0.0
        for one in islice(waiting, WAITING_MAX):
            none *= 1 - one.stall_share
            waiting_ms += one.stall_share * one.prefill_ms
        share = min(1.0, known.long.share(now_ms, cost))
        return LongPrompts(share, known.long_ms, 1 - none, waiting_ms)

    def _join(self, kind: tuple[str, str]) -> None:
        self._kinds.setdefault(kind, _Kind()).num_workers += 1

    def _leave(self, kind: tuple[str, str]) -> None:
        self._kinds[kind].num_workers -= 1
        if not self._kinds[kind].num_workers:
            del self._kinds[kind]
