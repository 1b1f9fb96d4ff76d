"""What share of their time workers lately gave to prompts, each and those of its kind together."""

from dataclasses import dataclass, field
from math import log

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.routing.estimates.place import StepCost

SHARE_HALF_LIFE_MS = 5_000
"""Longer than most answers, shorter than most shifts."""


@dataclass(slots=True)
class _Computed:
    """Tokens of prompts and their context; old ones fade with time."""

    tokens: float = 0.0
    context: float = 0.0
    until_ms: int = 0
    """They have faded until then."""

    def add(self, now_ms: int, tokens: float, context: float) -> None:
        self.fade(now_ms)
        self.tokens += tokens
        self.context += context

    def fade(self, now_ms: int) -> None:
        kept = 0.5 ** (max(0, now_ms - self.until_ms) / SHARE_HALF_LIFE_MS)
        self.tokens, self.context = kept * self.tokens, kept * self.context
        self.until_ms = max(self.until_ms, now_ms)

    def share(self, cost: StepCost, num_workers: int = 1) -> float:
        prompts_ms = self.tokens * cost.token_ms + self.context * cost.context_token_ms
        return min(1.0, max(0.0, prompts_ms * log(2) / SHARE_HALF_LIFE_MS / num_workers))


@dataclass(slots=True)
class _Kind:
    """Workers of one revision and role."""

    computed: _Computed = field(default_factory=_Computed)
    num_workers: int = 0


@dataclass(slots=True)
class _Known:
    kind: tuple[str, str]
    computed: _Computed = field(default_factory=_Computed)


class PromptShares:
    """Sums per worker, and per revision and role, so that a share takes no walk over workers."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Known] = {}
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def computed(self, now_ms: int, worker: WorkerInfo, tokens: float, context: float) -> None:
        """A worker has computed more of prompts: tokens, and their products with what is before.

        The first figures of a life only say that the worker is there: they may be of any time.
        """
        kind = worker.revision, worker.role
        known = self._workers.get(worker.incarnation)
        if known is None:
            self._workers[worker.incarnation] = _Known(kind)
            self._kinds.setdefault(kind, _Kind()).num_workers += 1
            return
        if known.kind != kind:  # another role from now on
            self._move(now_ms, known, kind)
        for one in (known.computed, self._kinds[kind].computed):
            one.add(now_ms, tokens, context)

    def forget(self, worker: Incarnation) -> None:
        """A worker has left."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._leave(known)

    def shares(self, now_ms: int, worker: WorkerInfo, cost: StepCost) -> tuple[float, float]:
        """The worker's own share, and that of all of its revision and role on average; 0 to 1.

        Args:
            now_ms: the time.
            worker: which.
            cost: of its steps.
        """
        known = self._workers.get(worker.incarnation)
        if known is None:
            return 0.0, 0.0
        kind = self._kinds[known.kind]
        for one in (known.computed, kind.computed):
            one.fade(now_ms)
        return known.computed.share(cost), kind.computed.share(cost, kind.num_workers)

    def _move(self, now_ms: int, known: _Known, kind: tuple[str, str]) -> None:
        self._leave(known)
        known.kind = kind
        joined = self._kinds.setdefault(kind, _Kind())
        joined.num_workers += 1
        known.computed.fade(now_ms)
        joined.computed.add(now_ms, known.computed.tokens, known.computed.context)

    def _leave(self, known: _Known) -> None:
        kind, own = self._kinds[known.kind], known.computed
        kind.num_workers -= 1
        if not kind.num_workers:
            del self._kinds[known.kind]
            return
        now_ms = max(kind.computed.until_ms, own.until_ms)
        own.fade(now_ms)
        kind.computed.add(now_ms, -own.tokens, -own.context)
