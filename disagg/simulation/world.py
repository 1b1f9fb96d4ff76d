"""One run of a simulated fleet: a trace in, what became of each request out."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from disagg.errors import DisaggError, InvariantViolation
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent
from disagg.messages.outputs import FinishReason
from disagg.messages.peer import PeerMessage
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import ToRouterMessage
from disagg.routing.actions import Deliver, Fail, NewRequest, RouterAction, ToWorker
from disagg.simulation.fleet_plan import FleetPlan
from disagg.simulation.host import Host
from disagg.simulation.links import Wires
from disagg.simulation.prompts import Prompts, TraceRequest
from disagg.simulation.routers import HEARTBEAT_MS, Routers
from disagg.simulation.virtual_time import VirtualTime
from disagg.simulation.worker import SimulatedWorker, links_too_slow

ROUTER_TICK_MS = 100.0
BEGIN_MS = 1_000.0
"""All workers are ready, and registered in their roles, by then; the trace's time 0."""
HASH_KEY = b"simulation"
EVENTS_PER_LOOK = 10_000
CHECKED_MAX = 32
"""Workers, evenly among all, whose whole pools are looked at when a run has ended."""

Watch = Callable[[float, int], None]
"""Told now and then of the virtual time, in ms of the trace, and of requests that have ended."""


def no_watch(now_ms: float, num_ended: int) -> None:
    """A `Watch` that looks away."""


@dataclass(slots=True)
class Outcome:
    """What became of a request; times in ms of the trace."""

    request: TraceRequest
    first_ms: float | None = None
    """Its first token at the client."""
    end_ms: float | None = None
    num_tokens: int = 0
    error: str = ""
    """Why it has no answer, or not all of it: a code of `disagg.errors`."""
    reason: str = ""
    """The same in words."""
    handed_over: bool = False
    num_cached: int = 0
    """Tokens of its prompt that were not computed."""
    second_ms: float | None = None
    """Its second token at the client."""
    planned: bool = False
    """Workers were chosen for it, whatever became of it."""

    @property
    def finished(self) -> bool:
        """All of its answer came."""
        return self.end_ms is not None and not self.error

    @property
    def ttft_ms(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_ms is None else self.first_ms - self.request.at_ms

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first; None where there is none."""
        if self.first_ms is None or self.end_ms is None or self.num_tokens < 2:
            return None
        return (self.end_ms - self.first_ms) / (self.num_tokens - 1)


class World:
    """A fleet and its routers in virtual time; the same seed, plan and trace bring the same.

    Args:
        plan: of the fleet.
        seed: of the delays that workers draw.

    Attributes:
        workers: by number.
        routers: of the production core; to be looked at only.
    """

    def __init__(self, plan: FleetPlan, seed: int = 0) -> None:
        self.plan = plan
        self.time = VirtualTime()
        self.hasher = BlockHasher(HASH_KEY, plan.curves.layout.hash_block_tokens)
        self._random = random.Random(seed)
        self._wires = Wires(plan.curves.link)
        self._prompts = Prompts()
        self.routers = Routers(plan.router, self.hasher, self._perform)
        self._outcomes: dict[str, Outcome] = {}
        self._num_asked = self._num_ended = self._num_to_come = 0
        self._began_ms = 0.0
        width = len(str(len(plan.roles)))
        self._hosts: dict[int, Host] = {}
        self.workers = [
            SimulatedWorker(
                self,
                Incarnation(f"{role}-{number:0{width}}", "1"),
                role,
                self._hosts.setdefault(number // plan.curves.workers_per_host, Host()),
            )
            for number, role in enumerate(plan.roles)
        ]
        self._by_name = {one.info.incarnation: one for one in self.workers}

    def run(self, trace: Sequence[TraceRequest], watch: Watch = no_watch) -> list[Outcome]:
        """Play a trace until every request has ended; an outcome for each, in its order.

        Another trace may be played afterwards: the fleet is as it was left, with what is cached.

        Raises:
            InvariantViolation: a request has no end, or a count does not add up.
            ExpiredError: the links are so slow that a real worker would end.
            DisaggError: the fleet cannot be built so.
        """
        outcomes = [Outcome(request) for request in trace]
        ids = [str(self._num_asked + number) for number in range(len(outcomes))]
        self._num_asked += len(outcomes)
        self._outcomes, self._num_ended = dict(zip(ids, outcomes, strict=True)), 0
        if not self.time.num_events:
            self._begin()
        self._began_ms = self.time.now_ms + BEGIN_MS
        self._num_to_come = len(outcomes)
        for request_id, request in zip(ids, trace, strict=True):
            self.time.after(BEGIN_MS + request.at_ms, partial(self._send, request_id))
        while self._num_ended < len(outcomes):
            self.time.advance()
            if not self.time.num_events % EVENTS_PER_LOOK:
                self._check_live()
                watch(self.time.now_ms - self._began_ms, self._num_ended)
        self._come_to_rest()
        self._check_workers()
        watch(self.time.now_ms - self._began_ms, self._num_ended)
        return outcomes

    def become(self, roles: Sequence[str]) -> None:
        """Let every worker register as another one from its next heartbeat on; nothing goes on."""
        for worker, role in zip(self.workers, roles, strict=True):
            worker.info = replace(worker.info, role=role)

    # --- as workers see it

    def retry_ms(self, passes: int) -> int:
        """See `Surroundings`."""
        least, most = self.plan.reserve_retry_ms
        return self._random.randint(least, most * min(passes, 10))

    def number_of(self, request_id: str) -> int:
        """See `Surroundings`."""
        return int(request_id)

    @property
    def report_pace_ms(self) -> int:
        """See `Surroundings`."""
        return self.routers.report_pace_ms

    def to_router(self, sender: Incarnation, message: ToRouterMessage) -> None:
        """See `Surroundings`."""
        self.time.after(
            self.plan.curves.hop_ms,
            lambda: self.routers.from_worker(self.time.clock_ms, sender, message),
        )

    def to_peer(self, sender: Incarnation, to: Incarnation, message: PeerMessage) -> None:
        """See `Surroundings`."""
        worker = self._by_name[to]
        self.time.after(self.plan.curves.hop_ms, lambda: worker.on_peer_message(sender, message))

    def kv_events(self, sender: Incarnation, first: int, events: tuple[KVEvent, ...]) -> None:
        """See `Surroundings`."""
        arrive = partial(self.routers.kv_events, sender, first, events)
        self.time.after(self.plan.curves.hop_ms, arrive)

    def read_ms(self, owner: Incarnation, reader: Incarnation, num_bytes: int) -> float:
        """See `Surroundings`."""
        return self._wires.read_ms(self.time.now_ms, owner, reader, num_bytes)

    # --- requests

    def _send(self, request_id: str) -> None:
        """It leaves its client; what its first token takes back to it is added here as well."""
        self._num_to_come -= 1
        curves = self.plan.curves
        way_ms = curves.request.at(self._outcomes[request_id].request.num_prompt)
        if curves.request_beside_ms:
            shares = [one.others_share(computes=False) for one in self._hosts.values()]
            way_ms += curves.request_beside_ms * sum(shares) / len(shares)
        self.time.after(way_ms, partial(self._ask, request_id))

    def _ask(self, request_id: str) -> None:
        outcome = self._outcomes[request_id]
        request = outcome.request
        tokens = self._prompts.tokens(request)
        hashes: list[bytes] = []
        self.hasher.extend(hashes, tokens)
        new = NewRequest(
            request_id,
            tokens,
            tuple(hashes),
            b"",
            SamplingParams(request.num_answer, num_prompt_tokens=len(tokens)),
            slo=self.plan.slo if request.slo is None else request.slo,
        )
        try:
            self.routers.generate(self.time.clock_ms, new)
        except DisaggError as error:
            self._end(request_id, error.code, error.message)

    def _perform(self, actions: Sequence[RouterAction]) -> None:
        for action in actions:
            match action:
                case ToWorker(incarnation, message):
                    worker = self._by_name[incarnation]
                    self.time.after(
                        self.plan.curves.hop_ms,
                        partial(worker.on_router_message, message),
                    )
                case Deliver():
                    self._deliver(action)
                case Fail(request_id, error):
                    self._end(request_id, error.code, error.message)
                case _:
                    pass  # sessions are open from the begin

    def _deliver(self, action: Deliver) -> None:
        outcome = self._outcomes[action.request_id]
        if outcome.first_ms is None:
            outcome.first_ms = self.time.now_ms - self._began_ms
        elif outcome.second_ms is None:
            outcome.second_ms = self.time.now_ms - self._began_ms
        outcome.num_tokens += len(action.token_ids)
        if action.finish_reason is not FinishReason.NONE:
            self._end(action.request_id, "")

    def _end(self, request_id: str, error: str, reason: str = "") -> None:
        outcome = self._outcomes[request_id]
        if outcome.end_ms is not None:
            raise InvariantViolation(f"request {request_id} ends twice")
        outcome.end_ms = self.time.now_ms - self._began_ms
        outcome.error, outcome.reason = error, reason
        self._num_ended += 1
        record = self.routers.ended(request_id)
        if record is not None and record.generations:
            outcome.planned = True
            outcome.handed_over = not record.generations[-1].local
            outcome.num_cached = record.cached_tokens

    def _come_to_rest(self) -> None:
        """Let the last commits and cancels arrive, and READs end that nobody waits for.

        Raises:
            ExpiredError: READs take longer than all bounds on waiting.
            InvariantViolation: a worker still has something else to do after these.
        """
        limits = self.plan.limits
        steps_ms = max(one.launched_ms for one in self.workers)  # their requests may be over
        bound_ms = self.time.now_ms + steps_ms + limits.lease_ttl_ms + limits.reservation_ttl_ms
        while restless := [one for one in self.workers if one.is_busy or one.reads]:
            if self.time.now_ms > bound_ms:
                busy = [one.info.incarnation for one in restless if one.is_busy]
                if not busy:
                    raise links_too_slow(restless[0].info.incarnation, "its READs do not end")
                raise InvariantViolation(f"{busy} do not come to rest")
            self.time.advance()

    def _check_live(self) -> None:
        """Verify that the routers know of no more than what has not ended.

        Raises:
            InvariantViolation: a request was forgotten on one side.
        """
        num_open = len(self._outcomes) - self._num_ended
        if self.routers.num_live > num_open:
            raise InvariantViolation(f"{self.routers.num_live} live requests, {num_open} open ones")

    def _check_workers(self) -> None:
        """Verify that nobody holds a thing, and the invariants of some who have computed.

        Raises:
            InvariantViolation: a worker's books are wrong.
        """
        for worker in self.workers:
            worker.check_rest()
        used = [one for one in self.workers if one.num_steps]
        for worker in used[:: -(-len(used) // CHECKED_MAX) or 1]:
            worker.check()

    # --- time

    def _begin(self) -> None:
        self._heartbeat()
        for worker in self.workers:
            worker.report()
        self._tick()

    def _tick(self) -> None:
        self.routers.tick(self.time.clock_ms)
        self.time.after(self._idle_ms() + ROUTER_TICK_MS, self._beat)

    def _beat(self) -> None:
        if not self.time.now_ms % HEARTBEAT_MS:
            self._heartbeat()
        self._tick()

    def _idle_ms(self) -> float:
        """Whole heartbeats to leave out: nobody has anything to do, and the next request is far.

        The routers' clock takes what is left out for a moment in which they stood still.
        """
        if self.routers.num_live or self.time.num_planned != self._num_to_come:
            return 0.0
        return max(0.0, (self.time.next_ms - self.time.now_ms) // HEARTBEAT_MS - 2) * HEARTBEAT_MS

    def _heartbeat(self) -> None:
        opens = self.time.now_ms < HEARTBEAT_MS
        for worker in self.workers:
            self.routers.register(self.time.clock_ms, worker.info, opens=opens)
