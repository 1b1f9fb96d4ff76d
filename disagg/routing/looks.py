"""Requests that wait: which of them are planned again, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from disagg.routing.policy.protocol import Plan
from disagg.routing.request import RoutedRequest
from disagg.routing.worker import Worker
from disagg.routing.worker_bits import bits_of

LOOK_MS = 100
"""Also where nothing has changed, others may be better after so long, or may be had again; shorter
than the work that a worker is left with while one waits for it."""

LOOK_MS_EACH = 16
"""Where many wait they are looked at so much more rarely, each."""

LOOKS_PER_S, LOOKS_MAX = 250, 32
"""Plans that come to nothing, of those that were planned before; and at once, if there were few
lately."""

SWEEPS_PER_S = 100
"""Without news, to see whether somebody is due: to look at a hundred takes 0.1 to 0.3 ms."""

FIRSTS_MAX = 16
"""Of those whose turn it is: planned at one look; others are left to the next one."""

HELD_MAX, SEEN_MAX = 2, 16
"""Of those that wait by choice and are nobody's first: planned at one look, of so many."""

Load = tuple[int, int, int]


class _Budget:
    """So many a second, and after a pause some at once."""

    def __init__(self, per_s: int = LOOKS_PER_S) -> None:
        self._per_s = per_s
        self._left = float(LOOKS_MAX)
        self._at_ms = 0

    def has(self, now_ms: int) -> bool:
        """Whether one more may be."""
        more = (now_ms - self._at_ms) * self._per_s / 1000
        self._left = min(float(LOOKS_MAX), self._left + more)
        self._at_ms = now_ms
        return self._left >= 1

    @property
    def is_low(self) -> bool:
        """Whether nobody should take more of it than others."""
        return self._left < LOOKS_MAX / 2

    def spend(self) -> None:
        """One was."""
        self._left -= 1


class _Gains:
    """Workers that came to have something, by their bits, and when."""

    def __init__(self) -> None:
        self.num = 0
        self._have = 0
        self._numbers: dict[int, int] = {}
        """Of those that still have it; the last one last."""

    @property
    def last(self) -> int:
        """Number of the last gain that still is one; 0 where there is none."""
        return next(reversed(self._numbers.values()), 0)

    def see(self, have: int) -> bool:
        """Take note of who has it now; whether somebody has come to have it."""
        gained, lost = have & ~self._have, self._have & ~have
        self._have = have
        for bit in bits_of(lost):
            del self._numbers[bit]
        for bit in bits_of(gained):
            self.num += 1
            self._numbers[bit] = self.num
        return bool(gained)


@dataclass(slots=True)
class _Look:
    at_ms: int
    look_ms: int
    """When to look again, whatever comes."""
    num_gains: int
    """Until then, of room or of workers without a prompt."""
    workers: tuple[Worker, ...]
    """Behind which it waits by choice; none where it found no room."""
    loads: tuple[Load, ...]
    """Of those, when it was looked at last."""


class Looks:
    """Whose turn it is to be planned; a plan takes up to some milliseconds.

    Who has not been looked at is planned at once. After that one that found no room is planned when
    a worker has room that had none then; one that waits by choice when a worker has no prompt to
    compute that had one, or when a prompt or an answer begins or ends where it would go; and both
    now and then. That a queue becomes shorter with each step is no news: its length is known.

    Plans that come to nothing have a budget, as of some hundred workers each reports several times
    a second, and what waits would keep the router from everything else. Each of those that are due
    has its part of it, however much comes for the ones before it; the very first of those that wait
    for room, and the first of those that wait by choice, have a budget each for themselves, for
    when room, or a worker without prompts, has come.
    """

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}
        self._held: dict[str, None] = {}
        """Who waits by choice, by whose turn it is among those that are nobody's first."""
        self._roomy = _Gains()
        self._idle = _Gains()
        self._has_news = False
        self._plans, self._sweeps, self._new = _Budget(), _Budget(SWEEPS_PER_S), _Budget()
        self._firsts = {False: _Budget(), True: _Budget()}
        """By whether they wait by choice."""

    @property
    def num_held(self) -> int:
        """Of those that wait, who did so by choice when it was looked at."""
        return len(self._held)

    def is_held(self, request_id: str) -> bool:
        """Whether a request waits by choice."""
        return request_id in self._held

    def see(self, roomy: int, idle: int) -> None:
        """Take note of the ready workers that have room, and of those without a prompt, by bits."""
        has_room, is_idle = self._roomy.see(roomy), self._idle.see(idle)
        if has_room or (is_idle and self._held):
            self._has_news = True

    def came(self) -> None:
        """A request has come that is a first."""
        self._has_news = True

    def end(self, request_id: str, *, was_first: bool) -> None:
        """A request waits no more; if it was a first another one is now."""
        self._looks.pop(request_id, None)
        self._held.pop(request_id, None)
        self._has_news = self._has_news or was_first

    def no_room(self, now_ms: int, request_id: str) -> None:
        """A request was planned, and there is no room for it, or none that is worth having."""
        self._held.pop(request_id, None)
        self._looks[request_id] = _Look(now_ms, self._next_ms(now_ms), self._roomy.num, (), ())

    def hold(self, now_ms: int, request: RoutedRequest, plan: Plan) -> bool:
        """A request was planned, and had better wait than go where this plan says.

        Returns:
            Whether it did not wait so before.
        """
        request.held_until_ms = now_ms + ceil(plan.hold_ms)
        look_ms = min(self._next_ms(now_ms), request.held_until_ms)
        workers = plan.prefill.worker, plan.decode.worker
        look = _Look(now_ms, look_ms, self._idle.num, workers, _loads(workers))
        self._looks[request.request_id] = look
        is_new = request.request_id not in self._held
        self._held[request.request_id] = None
        return is_new

    def wanted(self, now_ms: int) -> bool:
        """Whether to see who is due: at once where something has come, else so often a second."""
        if self._has_news:
            return True
        if not self._sweeps.has(now_ms):
            return False
        self._sweeps.spend()
        return True

    def due(self, now_ms: int, firsts: Sequence[str]) -> Iterator[str]:
        """Who is to be planned; the next one is asked for where nothing came of that.

        Args:
            now_ms: the time.
            firsts: who would go first, by turns.
        """
        num_sharing = len(firsts) + min(len(self._held), SEEN_MAX)
        each_ms = 1000 * num_sharing // LOOKS_PER_S
        free, num = {False, True}, 0
        for one in firsts:
            budget = self._budget_of(now_ms, one, each_ms, free)
            if budget is None:
                continue
            if num == FIRSTS_MAX:
                self._has_news = True  # for the next look
                return
            yield one
            budget.spend()
            num += 1
        seen, num = set(firsts), 0
        for one in list(islice(self._held, SEEN_MAX)):
            self._held[one] = self._held.pop(one)  # the turn goes to others
            budget = None if one in seen else self._budget_of(now_ms, one, each_ms, free)
            if budget is not None:
                yield one
                budget.spend()
                num += 1
                if num == HELD_MAX:
                    break
        self._has_news = False

    def _budget_of(
        self, now_ms: int, request_id: str, each_ms: int, free: set[bool]
    ) -> _Budget | None:
        """Of what to plan it, where it is due; the first of each sort, in ``free``, leaves that."""
        look = self._looks.get(request_id)
        if look is None:
            return self._new  # at once, whatever it has left
        by_choice = bool(look.workers)
        is_first = by_choice in free
        free.discard(by_choice)
        has_come = (self._idle if by_choice else self._roomy).last > look.num_gains
        if has_come and is_first and self._firsts[by_choice].has(now_ms):
            return self._firsts[by_choice]
        if not self._plans.has(now_ms):
            return None
        if look.look_ms <= now_ms:
            return self._plans
        if self._plans.is_low and now_ms < look.at_ms + each_ms:
            return None  # it has had its part
        return self._plans if has_come or _loads(look.workers) != look.loads else None

    def _next_ms(self, now_ms: int) -> int:
        return now_ms + max(LOOK_MS, LOOK_MS_EACH * len(self._looks))


def _loads(workers: tuple[Worker, ...]) -> tuple[Load, ...]:
    return tuple((one.num_prompts_queued, one.num_decoding, one.num_coming) for one in workers)
