"""How much of workers' time goes to prompts, by what they computed of them lately."""

from dataclasses import dataclass, field
from math import log

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.place import StepCost

HALF_LIFE_MS = 1_000
"""Of what was computed: about as long as answers, as it is their time per token that is asked for.
With more a worker that computed many prompts a while ago would get no answers to decode."""
OWN_SHARE = 0.5
"""Of what a worker computed itself. Where the prompts to come will be computed is decided then, by
the same estimates: as far as that is open they go to all workers of its role alike."""


@dataclass(slots=True)
class _Prompts:
    tokens: float = 0.0
    """Old ones fading with time; so is their context."""
    context: float = 0.0
    counted_ms: int = 0
    """Until then they have faded."""

    def fade(self, now_ms: int) -> None:
        """Time has gone by."""
        kept = 0.5 ** (max(0, now_ms - self.counted_ms) / HALF_LIFE_MS)
        self.tokens, self.context = kept * self.tokens, kept * self.context
        self.counted_ms = max(self.counted_ms, now_ms)

    def add(self, tokens: float, context: float) -> None:
        """More was computed; less than nothing: it is not counted here any more."""
        self.tokens = max(0.0, self.tokens + tokens)
        self.context = max(0.0, self.context + context)

    def ms(self, cost: StepCost) -> float:
        """What that takes a worker."""
        return self.tokens * cost.token_ms + self.context * cost.context_token_ms


@dataclass(slots=True)
class _Group:
    prompts: _Prompts = field(default_factory=_Prompts)
    num_workers: int = 0


class PromptShares:
    """Tokens of prompts that workers computed, alone and all those of a group together."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, tuple[tuple[str, str], _Prompts]] = {}
        self._groups: dict[tuple[str, str], _Group] = {}

    def add(
        self,
        now_ms: int,
        worker: Incarnation,
        group: tuple[str, str],
        tokens: float,
        context: float,
    ) -> None:
        """A worker computed more; of what it says first nobody knows when that was.

        Args:
            now_ms: the time.
            worker: who did.
            group: its revision and its role; what it did with another one is forgotten.
            tokens: of prompts.
            context: before them, per `SCALE_TOKENS`.
        """
        known = self._workers.get(worker)
        if known is None or known[0] != group:
            self.forget(worker)
            self._workers[worker] = group, _Prompts(counted_ms=now_ms)
            self._groups.setdefault(group, _Group()).num_workers += 1
            return
        for prompts in (known[1], self._groups[group].prompts):
            prompts.fade(now_ms)
            prompts.add(tokens, context)

    def forget(self, worker: Incarnation) -> None:
        """A worker has left its group."""
        if worker not in self._workers:
            return
        name, own = self._workers.pop(worker)
        group = self._groups[name]
        group.num_workers -= 1
        if not group.num_workers:
            del self._groups[name]
            return
        own.fade(group.prompts.counted_ms)
        group.prompts.add(-own.tokens, -own.context)

    def share(self, now_ms: int, worker: Incarnation, cost: StepCost) -> float:
        """Of a worker's time that will go to prompts, 0 to 1, by what its steps cost."""
        known = self._workers.get(worker)
        if known is None:
            return 0.0
        group = self._groups[known[0]]
        for prompts in (known[1], group.prompts):
            prompts.fade(now_ms)
        all_ms = group.prompts.ms(cost) / group.num_workers
        lately_ms = OWN_SHARE * known[1].ms(cost) + (1 - OWN_SHARE) * all_ms
        return min(1.0, lately_ms * log(2) / HALF_LIFE_MS)
