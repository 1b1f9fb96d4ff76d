"""The routers of a simulated fleet: one, or several that know nothing of each other."""

from collections.abc import Callable, Sequence
from itertools import count

from disagg.errors import InvariantViolation
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import ToRouterMessage, router_of
from disagg.routing.actions import NewRequest, RouterAction
from disagg.routing.core import RouterCore
from disagg.routing.options import RoutingOptions
from disagg.routing.record import RequestRecord
from disagg.simulation.fleet_plan import RouterPlan

HEARTBEAT_MS = 1_000.0
RECORDS_MAX = 64
"""A record is read when its request ends."""

Perform = Callable[[Sequence[RouterAction]], None]


class Routers:
    """Routers of the same workers, which take requests by turns.

    Args:
        plan: what each of them goes by, and how many there are.
        hasher: of the prompts.
        perform: takes what any of them does.

    Attributes:
        cores: each as in production; to be looked at only.
    """

    def __init__(self, plan: RouterPlan, hasher: BlockHasher, perform: Perform) -> None:
        names = ("",) if plan.num_routers == 1 else map(str, range(plan.num_routers))
        self._by_name = {
            name: RouterCore(
                RoutingOptions(
                    hasher_of=lambda _: hasher.extend,
                    replans_max=plan.replans_max,
                    requests_max=plan.requests_max,
                    request_timeout_ms=plan.request_timeout_ms,
                    records_max=RECORDS_MAX,
                    worker_silent_ms=int(10 * HEARTBEAT_MS),
                    policy=plan.policy,
                    policy_options=plan.options,
                    worker_prefill_tokens_max=plan.worker_prefill_tokens_max,
                    worker_waiting_max=plan.worker_waiting_max,
                    router_id=name,
                )
            )
            for name in names
        }
        self.cores = tuple(self._by_name.values())
        self._perform = perform
        self._turns = count()
        self._asked: dict[str, RouterCore] = {}
        """Who was asked, by a request's id."""

    @property
    def report_pace_ms(self) -> int:
        """So long a worker waits between two reports, as the slowest of them wants it."""
        return max(one.report_pace.stats_ms for one in self.cores)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(one.num_live for one in self.cores)

    def generate(self, now_ms: int, request: NewRequest) -> None:
        """Give a request to the router whose turn it is; raises as `RouterCore.generate`."""
        router = self.cores[next(self._turns) % len(self.cores)]
        self._asked[request.request_id] = router
        self._perform(router.generate(now_ms, request))

    def ended(self, request_id: str) -> RequestRecord | None:
        """The record of a request that has ended; asked for once."""
        return self._asked.pop(request_id).record(request_id)

    def from_worker(self, now_ms: int, sender: Incarnation, message: ToRouterMessage) -> None:
        """A message came to the router that it is for, or to all of them."""
        name = router_of(message)
        for router in (self._by_name[name],) if name else self.cores:
            self._perform(router.from_worker(now_ms, sender, message))

    def kv_events(self, sender: Incarnation, first: int, events: tuple[KVEvent, ...]) -> None:
        """A worker's events came to all of them.

        Raises:
            InvariantViolation: others should have come before.
        """
        for router in self.cores:
            if not router.kv_events(sender, sender.epoch, first, None, events):
                raise InvariantViolation(f"{sender}: a gap before event {first}")

    def register(self, now_ms: int, info: WorkerInfo, *, opens: bool) -> None:
        """A worker's heartbeat came; with ``opens`` its sessions are up then."""
        for router in self.cores:
            self._perform(router.register(now_ms, info))
            if opens:
                self._perform(router.session_up(now_ms, info.incarnation))

    def tick(self, now_ms: int) -> None:
        """Time has gone by."""
        for router in self.cores:
            self._perform(router.tick(now_ms))
