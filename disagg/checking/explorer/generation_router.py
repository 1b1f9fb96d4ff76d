"""The router as the explorer sees it: the production core, thawed, moved and frozen again."""

from collections.abc import Callable
from typing import Any, NamedTuple

from disagg.checking.explorer.snapshots import Snapshots
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract, GroupInfo, WorkerInfo
from disagg.messages.session import WorkerStats
from disagg.routing.actions import NewRequest, RouterAction
from disagg.routing.core import RouterCore

_CONTRACT = Contract("model", "float32", ("full",), 2, 1, "scheme", 1, 1)
_GROUPS = (GroupInfo("full_attention", 1, 0, 1, 2),)
_READY = WorkerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, ready=True)


class RouterMoved(NamedTuple):
    """One move: the router's number afterwards, and what it wants done."""

    router: int
    actions: tuple[RouterAction, ...]


class Routers:
    """All states of the router that were ever seen, by number; each move is made only once.

    Attributes:
        known: per state, the workers that it believes alive.
    """

    def __init__(
        self, hasher: BlockHasher, replans_max: int, mutate: Callable[[RouterCore], None]
    ) -> None:
        self._hasher = hasher
        self._replans_max = replans_max
        self._mutate = mutate
        self._infos: dict[Incarnation, WorkerInfo] = {}
        self._constants: list[Any] = [hasher, _CONTRACT, _GROUPS, *_GROUPS, _READY]
        self._snapshots = Snapshots(self._constants)
        self._frozen: list[tuple[bytes, tuple[type, ...]]] = []
        self._number: dict[tuple[bytes, tuple[type, ...]], int] = {}
        self._moves: dict[tuple[Any, ...], RouterMoved] = {}
        self.known: list[frozenset[Incarnation]] = []

    def start(self, workers: list[tuple[Incarnation, str]], request: NewRequest) -> RouterMoved:
        """A router to which these workers, with their roles, have come, and then a request."""
        core = RouterCore(
            hash_extend=self._hasher.extend,
            replans_max=self._replans_max,
            requests_max=1,
            request_timeout_ms=1,
            records_max=0,
            worker_silent_ms=1,
        )
        self._mutate(core)
        for life, role in workers:
            self._join(core, life, role)
        actions = core.generate(0, request)
        return RouterMoved(self._freeze(core), tuple(actions))

    def move(self, number: int, method: str, *args: Any) -> RouterMoved:
        """Call a method of the core; ``join`` is a registration, a session and first stats."""
        call = (number, method, *args)
        moved = self._moves.get(call)
        if moved is None:
            core = self.thaw(number)
            if method == "join":
                actions = self._join(core, *args)
            else:
                actions = getattr(core, method)(0, *args)
            moved = self._moves[call] = RouterMoved(self._freeze(core), tuple(actions))
        return moved

    def thaw(self, number: int) -> RouterCore:
        """A copy to look at."""
        core = self._snapshots.thaw(self._frozen[number])
        assert isinstance(core, RouterCore)
        return core

    def _join(self, core: RouterCore, life: Incarnation, role: str) -> list[RouterAction]:
        if life not in self._infos:
            self._infos[life] = WorkerInfo(life, "", role, "m", _CONTRACT, _GROUPS, 8, 8, 8)
        actions = core.register(0, self._infos[life])
        core.session_up(0, life)
        core.from_worker(0, life, _READY)
        return actions

    def _freeze(self, core: RouterCore) -> int:
        _make_canonical(core)
        frozen = self._snapshots.freeze(core)
        number = self._number.get(frozen)
        if number is None:
            number = self._number[frozen] = len(self._frozen)
            self._frozen.append(frozen)
            self.known.append(frozenset(view.info.incarnation for view in core.fleet))
        return number


def _make_canonical(core: RouterCore) -> None:
    """Forget what no decision depends on: counters and records, the order of sets."""
    core.counters.clear()
    requests, fleet = core._requests, core._fleet
    for request in requests._live.values():
        current = request.current
        # Of those given up only the number counts; the rest is for the record.
        request.generations = [current] * len(request.generations)
        current.reason = current.cause = ""
        current.finished_at = set(sorted(current.finished_at))
        request.killers = set(sorted(request.killers))
        exclusions = request.exclusions
        exclusions.workers, exclusions.decode = (
            set(sorted(exclusions.workers)),
            set(sorted(exclusions.decode)),
        )
        pairs = sorted(map(sorted, exclusions.pairs))
        exclusions.pairs = {frozenset(pair) for pair in pairs}
        ahead = request.stream._ahead
        request.stream._ahead = dict(sorted(ahead.items()))
    if not requests._live:  # no other request will come
        requests._last_generation = 0
        fleet._bad_pairs.clear()
        for worker in fleet._workers.values():
            worker.planned_requests = worker.planned_tokens = 0
