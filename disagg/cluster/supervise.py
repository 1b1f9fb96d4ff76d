"""Keeps the workers of the settings: finds, creates, replaces and spreads their actors."""

import logging
import time
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import ActorUnavailableError, RayError

from disagg.cluster.placement import has_room
from disagg.cluster.spread import (
    RayHost,
    Seat,
    choose_host,
    describe_shortage,
    find_hosts,
    find_move,
)
from disagg.cluster.supervised import Supervised
from disagg.cluster.turnover import Standing, find_next_to_leave
from disagg.cluster.worker_actors import create_actor, describe_free, end_actor, find_actors
from disagg.cluster.worker_plans import WorkerPlans
from disagg.config import Settings
from disagg.errors import ConfigError, ExpiredError
from disagg.workers.actor import WORKER_PATH, WorkerState

Report = Callable[[str], None]

_POLL_S = 0.5
_HOSTS_WAIT_S = 60.0
"""Hosts join while this starts; where more are made on demand they come later."""
_FOUND_WAIT_S = 15.0
"""Workers that are found say where they are before others are placed beside them."""
_SETTLE_S = 20.0
"""Before a worker moves to another host, that has been the better one for so long."""
_LOOK_S = 2.0
"""Hosts are looked at so often."""

log = logging.getLogger(__name__)


class Supervisor:
    """The workers of the settings, as actors of Ray. Not thread-safe.

    Lasting ones outlive this process: the next supervisor finds them by name and goes on. One whose
    settings have changed is replaced, one at a time; nobody else is touched. Others end with Ray's
    connection of this process.

    Workers are spread over the hosts, and one moves when hosts have become more unequal by two. One
    that ends is created anew, with growing delays if it ends soon again.
    """

    def __init__(
        self,
        settings: Settings,
        report: Report = log.info,
        worker_path: str = WORKER_PATH,
        *,
        lasting: bool = False,
    ) -> None:
        self._settings = settings
        self._report = report
        self._worker_path = worker_path
        self._lasting = lasting
        self._plans = WorkerPlans(settings, worker_path)
        self._workers: list[Supervised] = []
        self._hurried = False
        self._was_complete = False
        self._look_at_s = 0.0
        self._place_at_s = 0.0
        self._move: tuple[str, str] | None = None
        self._move_since_s = 0.0

    @property
    def states(self) -> list[WorkerState]:
        """Last known state of every wanted worker that has served."""
        return [w.state for w in self._workers if w.is_wanted and w.state is not None]

    @property
    def all_serve(self) -> bool:
        """Whether every wanted worker answered last, with the settings as they are."""
        return all(w.serves and self._plans.is_current(w.name) for w in self._workers)

    def find(self) -> None:
        """Take over the workers that run already."""
        if not self._lasting:
            return
        self._workers = [Supervised(name, actor=actor) for name, actor in find_actors().items()]
        if self._workers:
            self._report(f"found workers {', '.join(sorted(w.worker_id for w in self._workers))}")
            self._place_at_s = time.monotonic() + _FOUND_WAIT_S

    def start(self) -> None:
        """Find the workers that run already, and begin with the others; `poll` goes on."""
        self.find()
        kept: set[str] = set()
        # Of two with one id, which a supervisor left that was ended, the current one stays.
        for worker in sorted(
            self._workers, key=lambda worker: not self._plans.is_current(worker.name)
        ):
            worker_id = worker.worker_id
            worker.is_wanted = worker_id in self._plans.names and worker_id not in kept
            kept.add(worker_id)
        new = [name for name in self._plans.names.values() if name.worker_id not in kept]
        self._workers += [Supervised(name) for name in new]
        if new:
            self._wait_for_hosts()
            self._report(f"starting workers {', '.join(name.worker_id for name in new)}")
        for worker in self._workers:
            worker.late_at_s = time.monotonic() + self._settings.cluster.start_timeout_s

    def wait(self) -> None:
        """Return when every worker serves, for whoever cannot do with fewer.

        Raises:
            ConfigError: a worker cannot use its options, or ended before it served.
            ExpiredError: not all serve after ``cluster.start_timeout_s``.
        """
        deadline = time.monotonic() + self._settings.cluster.start_timeout_s
        while not self.all_serve:
            self.poll()
            for worker in self._workers:
                if worker.fault:
                    raise ConfigError(f"worker {worker.worker_id}: {worker.fault}")
            if time.monotonic() > deadline:
                missing = [w.worker_id for w in self._workers if not w.serves]
                raise ExpiredError(
                    f"workers {', '.join(missing)} do not serve after"
                    f" {self._settings.cluster.start_timeout_s:g} s",
                    param="cluster.start_timeout_s",
                )

    def poll(self) -> None:
        """Look at every worker once, about half a second; report what changed.

        Raises:
            ExpiredError: this host is not part of the cluster any more.
        """
        began_s = time.monotonic()
        self._hear()
        for worker in list(self._workers):
            self._go_on(worker)
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_S
            hosts = self._find_hosts()
            self._create_missing(hosts)
            self._turn_over(hosts)
            self._rebalance(hosts)
            self._report_late()
        if self.all_serve != self._was_complete:
            self._was_complete = self.all_serve
            self._report("all workers serve" if self._was_complete else "not all workers serve")
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - began_s)))

    def stop(self, *, drain: bool = False) -> None:
        """Stop all workers, within ``cluster.stop_timeout_s``, and end their actors.

        Args:
            drain: what goes on may end first, for ``worker.drain_timeout_ms``.
        """
        drain_s = self._settings.worker.drain_timeout_ms / 1000 if drain else 0.0
        for worker in self._workers:
            if worker.actor is not None and worker.leaving is None:
                self._ask_to_leave(worker, drain_s)
        waiting = [worker.leaving for worker in self._workers if worker.leaving is not None]
        deadline = max((worker.left_by_s for worker in self._workers), default=0.0)
        while waiting and time.monotonic() < deadline and not self._hurried:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
        for worker in self._workers:
            if worker.actor is not None:
                end_actor(worker.name, worker.actor)
        self._workers.clear()

    def hurry(self) -> None:
        """Let nothing that goes on end any more; for a signal handler, while `stop` runs."""
        self._hurried = True

    # What has been heard

    def _hear(self) -> None:
        asked = {worker.asked: worker for worker in self._workers if worker.asked is not None}
        if not asked:
            return
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_POLL_S)
        for ref in answered:
            worker = asked[ref]
            worker.asked = None
            try:
                self._heard(worker, ray.get(ref))
            except ActorUnavailableError as error:  # it may answer again
                self._say(worker, _last_line(error))
                worker.serves = False
            except RayError as error:  # its process has ended
                self._ended(worker, _last_line(error))

    def _heard(self, worker: Supervised, state: WorkerState) -> None:
        if state.refused or state.is_stopping:
            end_actor(worker.name, worker.actor)
            self._ended(worker, state.refused or "it was being stopped")
            return
        if worker.state is None or worker.state.epoch != state.epoch:
            again = " again" if worker.state is not None else ""
            self._report(
                f"worker {state.worker_id} serves{again} on {state.address}"
                f" (pid {state.pid}, epoch {state.epoch})"
            )
            if worker.state is None or worker.state.summary != state.summary:
                self._report(f"worker {state.worker_id} takes {state.summary}")
        worker.state, worker.serves, worker.is_awaited, worker.said = state, True, False, ""
        worker.node_id = state.node_id  # Ray may have started it elsewhere
        worker.back_off.runs(time.monotonic())

    def _ended(self, worker: Supervised, reason: str) -> None:
        served = worker.serves
        worker.actor, worker.serves = None, False
        if not worker.is_wanted or worker.leaving is not None:
            return
        worker.fault = "" if served else reason
        delay_s = worker.back_off.ended(time.monotonic())
        self._say(worker, f"{reason}; a new one in {delay_s:g} s")
        worker.create_at_s = time.monotonic() + delay_s

    def _say(self, worker: Supervised, reason: str) -> None:
        if reason != worker.said:
            self._report(f"worker {worker.worker_id}: {reason}")
        worker.said = reason

    def _report_late(self) -> None:
        for worker in self._workers:
            late = worker.is_wanted and worker.actor is not None and not worker.serves
            if late and worker.late_at_s < time.monotonic():
                worker.late_at_s = float("inf")
                self._report(
                    f"worker {worker.worker_id} does not serve after"
                    f" {self._settings.cluster.start_timeout_s:g} s{describe_free()}"
                )

    # What is done

    def _go_on(self, worker: Supervised) -> None:
        """Ask a worker that runs; end one that has been asked to leave."""
        if worker.leaving is not None:
            done, _ = ray.wait([worker.leaving], timeout=0)
            if not done and time.monotonic() < worker.left_by_s:
                return
            if worker.actor is not None:
                end_actor(worker.name, worker.actor)
            worker.actor = worker.asked = worker.leaving = None
            worker.serves = False
        if worker.actor is None and not worker.is_wanted:
            self._report(f"worker {worker.worker_id} has ended")
            self._workers.remove(worker)
        elif worker.actor is not None and worker.asked is None:
            worker.asked = worker.actor.describe.remote()

    def _ask_to_leave(self, worker: Supervised, drain_s: float) -> None:
        timeout_s = self._settings.cluster.stop_timeout_s
        worker.leaving = worker.actor.stop.remote(timeout_s, drain_s)
        worker.left_by_s = time.monotonic() + drain_s + timeout_s
        worker.asked, worker.serves = None, False

    def _leave(self, worker: Supervised) -> None:
        """Let a worker end; one that serves drains first."""
        if worker.actor is None:
            worker.leaving = None
        elif worker.serves:
            worker.is_awaited = worker.is_wanted
            self._ask_to_leave(worker, self._settings.worker.drain_timeout_ms / 1000)
        else:
            end_actor(worker.name, worker.actor)
            worker.actor = worker.asked = None

    def _create_missing(self, hosts: Sequence[RayHost]) -> None:
        now_s = time.monotonic()
        unheard = any(w.actor is not None and w.state is None for w in self._workers)
        if unheard and now_s < self._place_at_s:
            return
        for worker in self._workers:
            if worker.actor is not None or not worker.is_wanted or now_s < worker.create_at_s:
                continue
            worker_id = worker.worker_id
            if not self._plans.starts_ranks(worker_id):
                seats = self._seats()
                (seat,) = [each for each in seats if each.worker_id == worker_id]
                worker.node_id = choose_host(seat, seats, hosts, self._placed())
                if not worker.node_id:  # Ray waits for room, and may make a host for it
                    self._say(worker, f"finds no place: {describe_shortage(seat, hosts)}")
            self._create(worker)

    def _create(self, worker: Supervised) -> None:
        worker_id = worker.worker_id
        worker.name = self._plans.names[worker_id]
        try:
            worker.actor = create_actor(
                worker.name,
                self._plans.resolve(worker_id),
                self._worker_path,
                self._plans.needs(worker_id),
                worker.node_id,
                lasting=self._lasting,
            )
        except ValueError:  # the last one's name is not free yet
            log.debug("%s is not free yet", worker.name)

    def _turn_over(self, hosts: Sequence[RayHost]) -> None:
        """Let one worker leave whose settings have changed, or that is not wanted any more."""
        here = {host.node_id for host in hosts}
        standing = [
            Standing(
                f"{w.name}",
                is_wanted=w.is_wanted,
                is_current=w.actor is None or self._plans.is_current(w.name),
                serves=w.serves,
                is_leaving=w.leaving is not None,
                is_awaited=w.is_awaited,
                has_place=w.node_id in here,
            )
            for w in self._workers
        ]
        unheard = any(w.state is None and w.actor is not None for w in self._workers)
        if unheard and time.monotonic() < self._place_at_s:
            return  # who was found may serve, and then drains
        name = find_next_to_leave(standing)
        for worker in self._workers:
            if name is not None and str(worker.name) == name:
                why = "has new settings" if worker.is_wanted else "is not wanted any more"
                self._report(f"worker {worker.worker_id} {why}, it leaves")
                self._leave(worker)

    def _rebalance(self, hosts: Sequence[RayHost]) -> None:
        """Move a worker when hosts have become unequal, one at a time, and not at once."""
        now_s = time.monotonic()
        if any(w.leaving is not None or (w.node_id and not w.serves) for w in self._workers):
            self._move = None
            return
        move = find_move(self._seats(), hosts, self._placed())
        if move != self._move:
            self._move, self._move_since_s = move, now_s
        if move is None or now_s - self._move_since_s < _SETTLE_S:
            return
        (worker,) = [w for w in self._workers if w.is_wanted and w.worker_id == move[0]]
        (host,) = [host for host in hosts if host.node_id == move[1]]
        self._report(f"worker {move[0]} moves to {host.address}, where there are fewer")
        self._leave(worker)
        worker.node_id, self._move = host.node_id, None

    # What there is

    def _wait_for_hosts(self) -> None:
        """Wait a while: what workers get depends on how many hosts there are."""
        settings = self._settings
        deadline = time.monotonic() + min(_HOSTS_WAIT_S, settings.cluster.start_timeout_s)
        while True:
            all_there = len(self._find_hosts()) >= settings.cluster.num_hosts
            if all_there and has_room(settings, ray.cluster_resources()):  # type: ignore[no-untyped-call]
                return
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _find_hosts(self) -> list[RayHost]:
        """Hosts that live; what workers get of them is divided anew.

        Raises:
            ExpiredError: this host is none of them.
        """
        try:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
        except (RayError, RuntimeError, OSError) as error:
            raise ExpiredError(
                f"Ray's head does not answer: {_last_line(error)}", param="cluster.ray_address"
            ) from error
        own = ray.get_runtime_context().get_node_id()
        if not any(node["NodeID"] == own and node["Alive"] for node in nodes):
            raise ExpiredError(
                "this host does not belong to the Ray cluster any more: its head has gone or is"
                " another one",
                param="cluster.ray_address",
            )
        self._plans.divide(nodes)
        return find_hosts(nodes)

    def _placed(self) -> dict[str, str]:
        """Node id by worker id; of an old one that leaves by its actor's name."""
        return {w.key: w.node_id for w in self._workers if w.node_id}

    def _seats(self) -> list[Seat]:
        """Of the workers that are tied to a host; Ray places those whose ranks it starts."""
        return [
            self._plans.seat(w.key, w.role)
            for w in self._workers
            if not w.is_wanted or not self._plans.starts_ranks(w.worker_id)
        ]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
