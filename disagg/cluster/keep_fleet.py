"""The supervisor of workers as a child process: kept running, watched, ended with its workers."""

import logging
import os
import sys
import threading
import time

import yaml

from disagg.cluster.child import Child, how_it_ended
from disagg.cluster.counts import Counts
from disagg.cluster.fleet_health import FleetHealth
from disagg.cluster.fleet_report import FleetReport
from disagg.cluster.kept import Kept
from disagg.cluster.roles import assign_roles
from disagg.cluster.run_folder import RunFolder
from disagg.cluster.worker_plans import WorkerPlans
from disagg.config import Settings
from disagg.errors import DisaggError, ExpiredError
from disagg.workers.actor import WORKER_PATH

_POLL_S = 0.5

log = logging.getLogger(__name__)


def end_timeout_s(settings: Settings) -> float:
    """How long `FleetKeeper.stop` takes at most: the supervisor's end, then that of the workers."""
    cluster = settings.cluster
    return cluster.stop_timeout_s + _drain_timeout_s(settings)


def _drain_timeout_s(settings: Settings) -> float:
    cluster = settings.cluster
    return cluster.join_timeout_s + settings.worker.drain_timeout_ms / 1000 + cluster.stop_timeout_s


class FleetKeeper:
    """`disagg workers`, started again when it ends, and what it says of its workers.

    A thread of its own looks after it. The workers go on when this ends, unless they are drained.
    """

    def __init__(self, settings: Settings) -> None:
        """Check the settings as the supervisor will.

        Raises:
            ConfigError: settings or checkpoint cannot be used.
        """
        WorkerPlans(settings, WORKER_PATH, assign_roles(Counts.of_settings(settings)))
        self._settings = settings
        self._folder = RunFolder()
        text = yaml.safe_dump(settings.model_dump(mode="json"))
        self._file = self._folder.write("settings.yaml", text)
        self._report_file = self._folder.path / "report.json"
        self._supervisor = Kept(
            "supervisor", [*self._command, f"--report-file={self._report_file}"], log.warning
        )
        cluster = settings.cluster
        # The supervisor ends itself where Ray does not answer for twice that time.
        self._health = FleetHealth(
            cluster.start_timeout_s, 2 * cluster.join_timeout_s, time.monotonic()
        )
        self._ending = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="fleet-keeper", daemon=True)

    @property
    def _command(self) -> list[str]:
        workers = [sys.executable, "-m", "disagg.commands", "workers"]
        return [*workers, f"--config={self._file}", f"--end-with-parent={os.getpid()}"]

    @property
    def is_complete(self) -> bool:
        """Whether all workers serve."""
        return self._health.is_complete

    def check(self) -> None:
        """Do nothing while all serve, or may yet.

        Raises:
            ExpiredError: who does not, and why.
        """
        if not self._watching.is_alive():
            raise ExpiredError("nobody looks after the supervisor of the workers any more")
        if self._health.fault:
            raise ExpiredError(self._health.fault, param="cluster.start_timeout_s")

    def start(self) -> None:
        """Start the supervisor, which finds the workers that run already."""
        self._watching.start()

    def stop(self, *, drain: bool) -> None:
        """End the supervisor, within `end_timeout_s`.

        Args:
            drain: and then the workers; what goes on at them may end first.
        """
        self._ending.set()
        self._watching.join()
        if drain:
            try:
                self._end_workers()
            except DisaggError as error:
                log.error("%s", error.message)
        self._folder.remove()

    def _watch(self) -> None:
        # Starts and ends the child: the kernel ends it with the thread that has started it.
        while not self._ending.is_set():
            code = self._supervisor.poll()
            if code is not None:
                self._health.see_end(how_it_ended(code))
            child = self._supervisor.child
            report = FleetReport.read(self._report_file, child.pid) if child is not None else None
            self._health.see(report, time.monotonic())
            self._ending.wait(_POLL_S)
        try:
            self._supervisor.stop(self._settings.cluster.stop_timeout_s)
        except DisaggError as error:
            log.error("%s", error.message)

    def _end_workers(self) -> None:
        """Run `disagg workers --end`.

        Raises:
            ExpiredError: they have not ended in time.
        """
        child = Child("end of the workers", [*self._command, "--end"], None)
        deadline = time.monotonic() + _drain_timeout_s(self._settings)
        while not child.ended and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not child.ended:
            child.stop(0)
        if child.exit_code:
            raise ExpiredError(f"what was to end the workers {child.end}")
