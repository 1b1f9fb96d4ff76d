"""Keeps the workers that are wanted: finds, creates, replaces and spreads their actors."""

import logging
import time
from collections.abc import Callable

import ray
from ray.exceptions import ActorAlreadyExistsError

from disagg.cluster.counts import Fleet, Wish
from disagg.cluster.places import Places
from disagg.cluster.roles import assign_roles, own_role
from disagg.cluster.scale_record import read_fleet, read_wish, write_fleet
from disagg.cluster.supervised import Report, Supervised, last_line
from disagg.cluster.wanted_counts import WantedCounts
from disagg.cluster.worker_actors import (
    create_actor,
    describe_free,
    end_actor,
    find_actors,
    has_begun,
    remove_left_groups,
)
from disagg.cluster.worker_plans import WorkerPlans
from disagg.cluster.workforce import Workforce
from disagg.config import Settings
from disagg.errors import ConfigError, ExpiredError
from disagg.workers.actor import WORKER_PATH

_POLL_S = 0.5
_FOUND_WAIT_S = 15.0
"""Workers that are found say where they are before others are placed beside them."""
_LOOK_S = 2.0
"""Hosts, and what is wanted, are looked at so often."""

log = logging.getLogger(__name__)


class Supervisor:
    """The workers that settings, or `disagg scale`, want, as actors of Ray. Not thread-safe.

    Lasting ones outlive this process: the next supervisor finds them by name and goes on. One whose
    settings have changed is replaced, one at a time; nobody else is touched. Others end with Ray's
    connection of this process. One that is to have another role takes it while it runs.

    Workers are spread over the hosts, and one moves when hosts have become more unequal by two, or
    when Ray drains its host. One that ends is created anew, with growing delays if it ends soon
    again.

    Nothing is changed unless ``confirm`` returns, which raises where this process is not in charge.

    Attributes:
        workforce: the workers, and how they are.
    """

    def __init__(
        self,
        settings: Settings,
        report: Report = log.info,
        worker_path: str = WORKER_PATH,
        *,
        lasting: bool = False,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._report = report
        self._worker_path = worker_path
        self._lasting = lasting
        self._confirm = confirm
        self._prefix = settings.cluster.worker_id_prefix
        # Of no worker yet: who only ends workers need not know what they serve.
        plans = WorkerPlans(settings, worker_path, {})
        self.workforce = Workforce(plans, report, settings.cluster.start_timeout_s)
        self._wanted = WantedCounts(settings, report)
        self._places = Places()
        self._told: Fleet | None = None
        self._hurried = False
        self._was_complete = False
        self._look_at_s = 0.0
        self._place_at_s = 0.0

    def find(self) -> None:
        """Take over the workers that run already."""
        if not self._lasting:
            return
        told = read_fleet()
        roles = told.roles if told is not None else {}
        actors = find_actors()
        self._confirm()
        remove_left_groups(actors)
        for name, actor in actors.items():
            role = roles.get(name.worker_id) or own_role(name.worker_id)
            self.workforce.add_found(name, role, actor, has_served=has_begun(actor))
        if self.workforce.workers:
            self._report(
                f"found workers {', '.join(sorted(w.worker_id for w in self.workforce.workers))}"
            )
            self._place_at_s = time.monotonic() + _FOUND_WAIT_S

    def start(self) -> None:
        """Find the workers that run already, and begin with the others; `poll` goes on."""
        self.find()
        self._follow(read_wish())
        if any(worker.actor is None for worker in self.workforce.workers):
            settings = self._wanted.counts.into(self._settings)
            self._places.wait_for_hosts(settings, self.workforce.plans, self._confirm)

    def wait(self) -> None:
        """Return when every worker serves, for whoever cannot do with fewer.

        Raises:
            ConfigError: a worker cannot use its options, or ended before it served.
            ExpiredError: not all serve after ``cluster.start_timeout_s``.
        """
        deadline = time.monotonic() + self._settings.cluster.start_timeout_s
        while not self.workforce.all_serve:
            self.poll()
            for worker in self.workforce.workers:
                if worker.fault:
                    raise ConfigError(f"worker {worker.worker_id}: {worker.fault}")
            if time.monotonic() > deadline:
                missing = [w.worker_id for w in self.workforce.workers if not w.serves]
                raise ExpiredError(
                    f"workers {', '.join(missing)} do not serve after"
                    f" {self._settings.cluster.start_timeout_s:g} s",
                    param="cluster.start_timeout_s",
                )

    def poll(self) -> None:
        """Look at every worker once, about half a second; report what changed.

        Raises:
            ExpiredError: this host is not part of the cluster any more, or, as ChargeLostError,
                another process is in charge.
        """
        began_s = time.monotonic()
        self._hear()
        for worker in list(self.workforce.workers):
            self._confirm()
            self._go_on(worker)
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_S
            self._follow(read_wish())
            self._places.look(self.workforce.plans)
            for change in (
                self._clear_hosts,
                self._create_missing,
                self._turn_over,
                self._rebalance,
            ):
                self._confirm()
                change()
            self._report_late()
        self._confirm()
        self._tell()
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - began_s)))

    def stop(self, *, drain: bool = False) -> None:
        """Stop all workers, within ``cluster.stop_timeout_s``, and end their actors.

        Args:
            drain: what goes on may end first, for ``worker.drain_timeout_ms``.
        """
        self._confirm()
        for worker in self.workforce.workers:
            if worker.actor is not None and worker.leaving is None:
                worker.ask_to_leave(self._stop_s, self._drain_s if drain else 0.0)
        waiting = [
            worker.leaving for worker in self.workforce.workers if worker.leaving is not None
        ]
        deadline = max((worker.left_by_s for worker in self.workforce.workers), default=0.0)
        while waiting and time.monotonic() < deadline and not self._hurried:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            self._confirm()
        for worker in self.workforce.workers:
            if worker.actor is not None:
                self._confirm()
                end_actor(worker.name, worker.actor)
        self.workforce.workers.clear()

    def close(self) -> None:
        """Look after the workers no more; they stay."""
        self._wanted.close()

    def hurry(self) -> None:
        """Let nothing that goes on end any more; for a signal handler, while `stop` runs."""
        self._hurried = True

    @property
    def _stop_s(self) -> float:
        return self._settings.cluster.stop_timeout_s

    @property
    def _drain_s(self) -> float:
        return self._settings.worker.drain_timeout_ms / 1000

    # What is wanted

    def _follow(self, wish: Wish | None) -> None:
        """Want as many workers as settings, the load or `disagg scale` say, if that has changed."""
        if not self._wanted.follow(wish, self.workforce.serving):
            return
        counts = self._wanted.counts
        roles = assign_roles(
            counts,
            self.workforce.present,
            may_change=not self._settings.cluster.role_resources,
            prefix=self._prefix,
        )
        self.workforce.want(WorkerPlans(counts.into(self._settings), self._worker_path, roles))

    # What is done

    def _hear(self) -> None:
        asked = {
            worker.asked: worker for worker in self.workforce.workers if worker.asked is not None
        }
        if asked:
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_POLL_S)
            self._confirm()
            for ref in answered:
                asked[ref].hear()

    def _go_on(self, worker: Supervised) -> None:
        """Ask a worker that runs; end one that has been asked to leave."""
        patience_s = self._settings.cluster.start_timeout_s
        if worker.is_unheard:  # it may drain still, as the last supervisor has asked it to
            patience_s += self._drain_s + self._stop_s
        worker.see_silence(time.monotonic(), patience_s)
        worker.end_if_left()
        if worker.actor is None and not worker.is_wanted:
            self._report(f"worker {worker.worker_id} has ended")
            self.workforce.workers.remove(worker)
        else:
            worker.ask(
                takes_roles=worker.is_wanted and self.workforce.plans.is_current(worker.name)
            )

    def _clear_hosts(self) -> None:
        """Let the workers go elsewhere whose hosts are about to be taken away."""
        for worker, left_s in self._places.find_drained(self.workforce.workers, time.time()):
            self._report(f"worker {worker.worker_id} leaves its host, which Ray drains")
            worker.leave(self._stop_s, min(self._drain_s, left_s))

    def _create_missing(self) -> None:
        now_s = time.monotonic()
        if now_s < self._place_at_s and any(worker.is_unheard for worker in self.workforce.workers):
            return
        for worker in self.workforce.workers:
            if worker.actor is None and worker.is_wanted and now_s >= worker.create_at_s:
                self._confirm()
                self._places.seat(worker, self.workforce.workers, self.workforce.plans)
                self._create(worker)

    def _create(self, worker: Supervised) -> None:
        worker_id = worker.worker_id
        worker.name = self.workforce.plans.names[worker_id]
        try:
            worker.actor = create_actor(
                worker.name,
                self.workforce.plans.resolve(worker_id),
                self._worker_path,
                self.workforce.plans.needs(worker_id),
                worker.node_id,
                lasting=self._lasting,
            )
        except ActorAlreadyExistsError:  # the last one's name is not free yet
            log.debug("%s is not free yet", worker.name)
        except ValueError as error:
            worker.fault = f"Ray refuses it: {last_line(error)}"
            worker.say(worker.fault)
            now_s = time.monotonic()
            worker.create_at_s = now_s + worker.back_off.ended(now_s)

    def _turn_over(self) -> None:
        """Let one worker leave whose settings have changed, or that is not wanted any more."""
        if time.monotonic() < self._place_at_s and any(
            w.is_unheard for w in self.workforce.workers
        ):
            return  # who was found may serve, and then drains
        worker = self.workforce.find_next_to_leave({host.node_id for host in self._places.hosts})
        if worker is not None:
            why = "has new settings" if worker.is_wanted else "is not wanted any more"
            self._report(f"worker {worker.worker_id} {why}, it leaves")
            worker.leave(self._stop_s, self._drain_s)

    def _rebalance(self) -> None:
        """Move a worker when hosts have become unequal."""
        move = self._places.find_move(self.workforce.workers, self.workforce.plans)
        if move is not None:
            worker, host = move
            self._report(
                f"worker {worker.worker_id} moves to {host.address}, where there are fewer"
            )
            worker.leave(self._stop_s, self._drain_s)
            worker.node_id = host.node_id

    # What is said

    def _report_late(self) -> None:
        patience_s = self._settings.cluster.start_timeout_s
        for worker in self.workforce.workers:
            if worker.is_late(time.monotonic(), patience_s):
                self._report(
                    f"worker {worker.worker_id} does not serve after"
                    f" {patience_s:g} s{describe_free()}"
                )

    def _tell(self) -> None:
        """Say what there is, here and in the cluster, when it has changed."""
        all_serve = self.workforce.all_serve
        if all_serve != self._was_complete:
            self._was_complete = all_serve
            self._report("all workers serve" if all_serve else "not all workers serve")
        fleet = Fleet(
            self._wanted.counts,
            self._wanted.by,
            self.workforce.plans.roles,
            self.workforce.serving,
            self.workforce.waiting,
        )
        if fleet != self._told:
            write_fleet(fleet)
            self._told = fleet
