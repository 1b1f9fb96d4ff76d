"""The whole system in one seeded, single-threaded world: router core, worker cores, faults.

The objects are the ones production runs; what is modelled is the world around them: links with
delays that keep their order until they break, steps and READs that take time, READs that copy
block by block, processes that die and come back with a new epoch. A run is a function of its
configuration and seed.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from disagg.errors import DisaggError
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason
from disagg.messages.peer import PeerMessage
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, TransferKind, TransferReport
from disagg.messages.session import PartEnded, ToRouterMessage
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.routing.actions import (
    CacheResetEnded,
    Deliver,
    Fail,
    NewRequest,
    RouterAction,
    ToWorker,
)
from disagg.routing.core import RouterCore
from disagg.routing.options import RoutingOptions
from disagg.routing.policy.protocol import PolicyOptions
from disagg.scheduling.stats import check_core
from disagg.testing.simulation.bounds import Client, Patience, check_router
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.failed_read import FailedRead, failed_read
from disagg.testing.simulation.faults import Faults
from disagg.testing.simulation.links import ROUTER, SimulatedLinks
from disagg.testing.simulation.load import plan_requests
from disagg.testing.simulation.symbolic_tier import SimulatedTier, SymbolicStore
from disagg.testing.simulation.worker_model import WorkerModel
from disagg.transfer.actions import PostRead

HASH_KEY = b"simulation"


class Simulation:
    """One run. `run` returns when every request ended and the world came to rest."""

    def __init__(self, config: SimulationConfig, seed: int) -> None:
        self.config = config
        self.now_ms = 0
        self.clients: dict[str, Client] = {}
        self.workers: dict[str, WorkerModel] = {}
        self.num_handovers = 0
        self.num_pulls = 0
        self.resets: list[CacheResetEnded] = []
        """Of the prefix caches, ended."""
        self.pulls_failed: Counter[str] = Counter()
        """By cause."""
        self.num_events = 0
        """Messages that arrived or were lost, steps and READs that ended."""
        self.num_reads = self.num_flips = 0
        self.failed_reads: list[FailedRead] = []
        """Those that were planned."""
        self.hasher = BlockHasher(HASH_KEY, config.layout.hash_block_tokens)
        self.router = RouterCore(
            RoutingOptions(
                hasher_of=lambda _: self.hasher.extend,
                replans_max=config.replans_max,
                requests_max=config.requests_max,
                request_timeout_ms=config.request_timeout_ms,
                records_max=config.records_max,
                worker_silent_ms=config.worker_silent_ms,
                policy=config.policy,
                policy_options=PolicyOptions(pull_tokens_min=config.pull_tokens_min),
            )
        )
        self._patience = Patience(config, self.clients)
        self.random = random.Random(seed)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._links = SimulatedLinks(self)
        self._faults = Faults(self, self._links)
        self._num_epochs = 0
        self._infos: dict[Incarnation, WorkerInfo] = {}
        self._stores: dict[tuple[str, str], SymbolicStore] = {}

    def run(self) -> None:
        """Play the world to its end.

        Raises:
            InvariantViolation: somebody read what it must not, a count does not add up, or a bound
                on load or on waiting was broken.
            AssertionError: wrong tokens, a request without an end, or blocks that stayed held.
        """
        for number, role in enumerate(self.config.roles):
            self.start_worker(f"w{number}", role)
        plan_requests(self)
        self._faults.plan()
        self._every(self.config.heartbeat_ms, self._heartbeat)
        self._every(self.config.tick_ms, self._tick)
        while not self._at_rest():
            self.now_ms, _, event = heapq.heappop(self._events)
            assert self.now_ms < self.config.time_limit_ms, f"no end: {self.unfinished()}"
            event()
        self._check_end()

    # --- the world as workers see it

    def draw(self, low: int, high: int) -> int:
        """A seeded random number, both ends included."""
        return self.random.randint(low, high)

    def later(self, delay_ms: int, event: Callable[[], None]) -> None:
        """Let something happen after a delay; ties are broken by order of planning."""
        self._num_planned += 1
        heapq.heappush(self._events, (self.now_ms + delay_ms, self._num_planned, event))

    def event(self, delay_ms: int, happen: Callable[[], None]) -> None:
        """The same, for what is numbered, so that a planned fault can come before it."""

        def numbered() -> None:
            self.num_events += 1
            self._faults.before_event(self.num_events)
            happen()

        self.later(delay_ms, numbered)

    def read_fault(self, reader: WorkerModel, read: PostRead) -> str:
        """Why a READ that is posted now will fail, or ""."""
        fails = self.draw(1, 1000) <= self.config.read_errors_per_mille
        self.num_reads += 1
        if self.num_reads in self.config.failing_reads:
            self.failed_reads.append(failed_read(reader.core, read))
            fails = True
        return "injected" if fails else ""

    def store(self, worker: str, tier: SimulatedTier) -> SymbolicStore:
        """The blocks of a tier: a worker that returns finds those of its earlier lives."""
        owner = "" if tier.shared else worker
        return self._stores.setdefault((owner, tier.name), SymbolicStore(tier.blocks_max))

    def find(self, incarnation: Incarnation) -> WorkerModel | None:
        """The living worker of that incarnation."""
        worker = self.workers.get(incarnation.worker_id)
        return worker if worker and worker.alive and worker.me == incarnation else None

    def info_of(self, incarnation: Incarnation) -> WorkerInfo:
        """Registration of a worker that lives or lived."""
        return self._infos[incarnation]

    def to_peer(self, sender: Incarnation, to: Incarnation, message: PeerMessage) -> None:
        """A message between workers; one to a dead incarnation is lost."""

        def deliver() -> None:
            worker = self.find(to)
            if worker is not None:
                worker.on_peer_message(sender, message)

        self._links.send(sender.worker_id, to.worker_id, deliver)

    def to_router(self, sender: Incarnation, message: ToRouterMessage) -> None:
        """A message on a worker's session."""
        if isinstance(message, PartEnded):
            self._patience.part_ended(self.now_ms, message)
        if isinstance(message, TransferReport | PrefillReport):
            self._patience.reported(self.now_ms, message.key)
        if isinstance(message, TransferReport):
            if message.failed:
                self.pulls_failed[message.failed.partition(":")[0]] += 1
            elif message.kind is TransferKind.PREFIX:
                self.num_pulls += 1
            else:
                self.num_handovers += 1

        def deliver() -> None:
            self._perform(self.router.from_worker(self.now_ms, sender, message))

        self._links.send(sender.worker_id, ROUTER, deliver)

    def computed(self, key: RequestKey, num_tokens: int) -> None:
        """A step has computed so many positions of a generation."""
        self._patience.computed(self.now_ms, key, num_tokens)

    def has_read(self, key: RequestKey) -> None:
        """A READ of a generation has ended well."""
        self._patience.has_read(self.now_ms, key)

    # --- router

    def _perform(self, actions: list[RouterAction]) -> None:
        for action in actions:
            match action:
                case ToWorker():
                    self._to_worker(action)
                case Deliver():
                    self._deliver(action)
                case CacheResetEnded():
                    self.resets.append(action)
                case Fail(request_id, error):
                    self._patience.failed(self.now_ms, request_id, error)
                    self._over(request_id, f"{error.code}: {error.message}")
                case _:
                    pass  # sessions are opened by the heartbeat
        check_router(self.router, self.config)

    def _to_worker(self, action: ToWorker) -> None:
        message = action.message
        if isinstance(message, Submit):
            self._patience.planned(self.now_ms, message.key)
        if isinstance(message, Submit) and message.role is not Role.DECODE:
            message = self._perhaps_wild(action.worker, message)

        def deliver() -> None:
            worker = self.find(action.worker)
            if worker is not None:
                worker.on_router_message(message)

        self._links.send(ROUTER, action.worker.worker_id, deliver)

    def _perhaps_wild(self, worker: Incarnation, submit: Submit) -> Submit:
        """What the router knows of caches is never trusted: let it be anything."""
        if self.draw(1, 1000) > self.config.wild_pulls_per_mille:
            return submit
        name = self.random.choice([one for one in sorted(self.workers) if one != worker.worker_id])
        owner = PeerAddress(self.workers[name].me, "simulated:1")
        return replace(submit, pull=PullPlan(owner, self.draw(0, len(submit.token_ids) + 8)))

    def _deliver(self, action: Deliver) -> None:
        client = self.clients[action.request_id]
        assert not client.outcome, f"{action} after the end: {client}"
        client.take(action)
        self._patience.delivered(self.now_ms, action.request_id)
        if action.finish_reason is not FinishReason.NONE:
            self._over(action.request_id, "finished")

    def _over(self, request_id: str, outcome: str) -> None:
        client = self.clients[request_id]
        client.outcome, client.ended_ms = outcome, self.now_ms

    def _heartbeat(self) -> None:
        for worker in self.workers.values():
            if worker.alive:
                self._perform(self.router.register(self.now_ms, worker.info))
                self._perform(self.router.session_up(self.now_ms, worker.me))
                self.to_router(worker.me, worker.stats())

    def _tick(self) -> None:
        self._perform(self.router.tick(self.now_ms))
        self._patience.check(self.now_ms)
        for worker in self.workers.values():
            if worker.alive:
                worker.tick()
                check_core(worker.core)
                first, events = worker.kv_events()
                self.router.kv_events(worker.me, worker.me.epoch, first, None, events)

    # --- time

    def _every(self, period_ms: int, event: Callable[[], None]) -> None:
        def again() -> None:
            event()
            self.later(period_ms, again)

        self.later(0, again)

    # --- load

    def ask(self, request_id: str, client: Client) -> None:
        """A request arrives."""
        self.clients[request_id] = client
        client.asked_ms = client.progress_ms = self.now_ms
        hashes: list[bytes] = []
        self.hasher.extend(hashes, client.prompt)
        new = NewRequest(request_id, client.prompt, tuple(hashes), b"", client.sampling)
        try:
            self._perform(self.router.generate(self.now_ms, new))
        except DisaggError as error:
            self._over(request_id, f"{error.code}: {error.message}")

    # --- what faults do

    def cancel(self, request_id: str) -> None:
        """A client goes away."""
        self._over(request_id, "cancelled")
        self._perform(self.router.cancel(self.now_ms, request_id, "client"))

    def reset_prefix_caches(self) -> None:
        """An operator asks for it; the router may refuse."""
        with suppress(DisaggError):
            self._perform(self.router.reset_prefix_caches(self.now_ms))

    def lose_session(self, worker: Incarnation) -> None:
        """The router notices that a worker is gone."""
        self._perform(self.router.session_lost(self.now_ms, worker))

    def start_worker(self, name: str, role: str) -> None:
        """A worker begins its first life, or one more."""
        self._num_epochs += 1
        layouts = self.config.layouts
        layout = layouts[int(name[1:])] if layouts else self.config.layout
        me = Incarnation(name, f"e{self._num_epochs}")
        self.workers[name] = WorkerModel(self, me, role, layout)
        self._infos[me] = self.workers[name].info

    # --- the end

    def unfinished(self) -> list[str]:
        """Requests that have not ended."""
        return sorted(request for request, client in self.clients.items() if not client.outcome)

    def _at_rest(self) -> bool:
        return (
            len(self.clients) == (len(self.config.script) or self.config.num_requests)
            and not self.unfinished()
            and all(worker.at_rest() for worker in self.workers.values() if worker.alive)
        )

    def _check_end(self) -> None:
        assert self.router.num_live == 0
        num_records = sum(self.router.record(one) is not None for one in self.clients)
        most = self.config.records_max
        assert num_records <= most, f"{num_records} records, at most {most}"
        for request_id, one in self.clients.items():
            one.check(request_id, self.config)
        for worker in self.workers.values():
            check_core(worker.core)
