"""The router as a world sees it, the core or a scripted one: thawed, moved and frozen again."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from disagg.checking.explorer.scripted_router import ScriptedRouter
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.snapshots import Snapshots
from disagg.checking.explorer.tokens import Vocabulary
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract, GroupInfo, WorkerInfo
from disagg.messages.sampling import SamplingParams
from disagg.messages.stats import WorkerStats
from disagg.routing.actions import NewRequest, RouterAction
from disagg.routing.core import RouterCore
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.looks import Looks
from disagg.routing.options import RoutingOptions
from disagg.routing.revisions import HashExtend

_CONTRACT = Contract("model", "float32", ("full",), "pages", 2, 1, "scheme", 1, 1)
_GROUPS = (GroupInfo("full_attention", 1, 0, 1, 2),)
_READY = WorkerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, ready=True)


class RouterMoved(NamedTuple):
    """One move: the router's number afterwards, and what it wants done."""

    router: int
    actions: tuple[RouterAction, ...]


@dataclass(frozen=True)
class OneHasher:
    """Names the blocks of all workers alike; can be frozen with a router."""

    hasher: BlockHasher

    def __call__(self, _: WorkerInfo) -> HashExtend:
        """See ``HasherOf``."""
        return self.hasher.extend


class Routers:
    """Every state of the router that was ever seen, by number; each move is made only once.

    Attributes:
        move: the router after a move, which is called only once: see `_move`.
        known: per number, the workers that it believes alive.
        served: per number, whether it has ended nothing before its time (the scripted one).
    """

    def __init__(self, setting: Setting, hasher: BlockHasher, vocabulary: Vocabulary) -> None:
        self._setting = setting
        self._hasher = hasher
        self._vocabulary = vocabulary
        self._infos: dict[Incarnation, WorkerInfo] = {}
        constants: list[Any] = [hasher, _CONTRACT, _GROUPS, *_GROUPS, _READY]
        constants += [vocabulary, setting, *setting.requests]
        self._snapshots = Snapshots(constants)
        self.move = cache(self._move)
        self.known: list[frozenset[Incarnation]] = []
        self.served: list[bool] = []

    def start(self, lives: list[Incarnation]) -> RouterMoved:
        """A router to which these workers have come, and then every request."""
        setting, actions = self._setting, list[RouterAction]()
        if not setting.roles:
            scripted = ScriptedRouter(setting, self._vocabulary, lives)
            actions += scripted.start()
            return RouterMoved(self.freeze(scripted), tuple(actions))
        core = RouterCore(
            RoutingOptions(
                hasher_of=OneHasher(self._hasher),
                replans_max=setting.generations_max - 1,
                requests_max=len(setting.requests),
                request_timeout_ms=1,
                records_max=0,
                worker_silent_ms=1,
                worker_stalled_ms=0,
            )
        )
        setting.mutate_router(core)
        for life, role in zip(lives, setting.roles, strict=True):
            self._join(core, life, role)
        for name, one in zip("rstuv", setting.requests, strict=False):
            sampling = SamplingParams(max_tokens=one.max_tokens)
            new = NewRequest(name, one.prompt, (), b"", sampling, revision=core.assign(name))
            actions += core.generate(0, new)
        return RouterMoved(self.freeze(core), tuple(actions))

    def _move(self, number: int, method: str, *args: Any) -> RouterMoved:
        """Call a method; ``join`` is a registration, a session and first stats."""
        core = self.thaw(number)
        actions = self._join(core, *args) if method == "join" else getattr(core, method)(0, *args)
        return RouterMoved(self.freeze(core), tuple(actions))

    def thaw(self, number: int) -> Any:
        """A copy to look at."""
        return self._snapshots.thaw(number)

    def _join(self, core: Any, life: Incarnation, role: str) -> list[RouterAction]:
        if isinstance(core, ScriptedRouter):
            core.known.append(life)
            return []
        if life not in self._infos:
            self._infos[life] = WorkerInfo(life, "", role, "m", _CONTRACT, _GROUPS, 8, 8, 8)
        actions: list[RouterAction] = core.register(0, self._infos[life])
        core.session_up(0, life)
        core.from_worker(0, life, _READY)
        return actions

    def freeze(self, core: Any) -> int:
        """The number of a router; equal ones have equal ones."""
        if isinstance(core, RouterCore):
            _make_canonical(core)
        number = self._snapshots.freeze(core)
        if number == len(self.known):
            is_core = isinstance(core, RouterCore)
            lives = (view.info.incarnation for view in core.fleet) if is_core else core.known
            self.known.append(frozenset(lives))
            over = () if is_core else [key for key in core.over if key.router not in core.gone]
            self.served.append(not is_core and not over)
        return number


def _make_canonical(core: RouterCore) -> None:
    """Forget what no decision depends on: counters and records."""
    core.counters.clear()
    live, fleet = core._live, core._fleet
    fleet.speeds = Speeds()
    while len(live._pace._marks) > 1:
        live._pace._marks.pop()
    if not len(core._admission):  # whose turn it was
        live.has_freed = False
        core._admission._looks = Looks()
        core._lifecycle._turns._tenants.clear()
        core._lifecycle._turns._virtual = core._lifecycle._turns._num_arrived = 0
    for request in live:
        current = request.current
        # Of those given up only the number counts; the rest is for the record.
        request.generations = [current] * len(request.generations)
        current.reason = current.cause = ""
        current.estimate, current.considered = None, ()
        ahead = request.stream._ahead
        request.stream._ahead = dict(sorted(ahead.items()))
    if not live:  # no other request will come
        core._lifecycle._last_generation = 0
        fleet.bad_pairs._until_ms.clear()
        fleet.bad_pairs._stuck.clear()
        for worker in fleet._workers.values():
            worker.planned_requests = worker.planned_tokens = 0
