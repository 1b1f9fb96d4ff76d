"""A whole system of one machine: Ray, workers, router. What `disagg serve` and the demo run."""

import contextlib
import http.client
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import yaml

from disagg.cluster.child import MEMORY, Child, how_it_ended
from disagg.cluster.hash_key import with_hash_key
from disagg.cluster.own_settings import CERTIFICATES, decide_ports, with_certificates
from disagg.cluster.processes import (
    ProcessId,
    adopt_orphans,
    end_processes,
    exit_code,
    find_children,
    find_descendants,
    is_alive,
    named,
)
from disagg.cluster.ray_cluster import num_workers, start_ray, stop_ray
from disagg.cluster.ray_watch import RayWatch
from disagg.cluster.run_folder import RunFolder
from disagg.config import Settings, local_router_address, reachable_host, router_options
from disagg.errors import ConfigError, DisaggError, ExpiredError
from disagg.telemetry.open_files import tight_limits
from disagg.telemetry.task_limits import tasks_left
from disagg.tls.authority import remove_keys
from disagg.workers.actor import WORKER_PATH, WorkerState
from disagg.workers.engines.checkpoint_files import check_files, read_weights

if TYPE_CHECKING:
    from disagg.cluster.supervise import Supervisor

log = logging.getLogger(__name__)

_GCS = "gcs_server"
_RAY_PARTS = (_GCS, "raylet")
"""Ray's library ends this process a minute after one of them has, and leaves everything behind."""
_TASKS = 192
_TASKS_PER_WORKER = 32
"""Processes and threads that Ray with the router take, and each worker, where there are two cores.
With fewer Ray does not start, hangs, or leaves processes behind."""
_RAY_START_S = 60.0
"""That the last try may take behind `cluster.start_timeout_s`: parts of Ray have 30 s each."""
_GCS_PATIENCE_S = 30.0
"""Without one while Ray starts, which includes that it is ended and started again."""
_KILL_S = 2.0
_POLL_S = 0.1
_HTTP_TIMEOUT_S = 2.0


class LocalCluster:
    """Starts everything, keeps watch, and leaves nothing behind. One per process at a time.

    Attributes:
        settings: with all ports decided, after `start`.
        faults: what went wrong while starting or stopping; logs are kept when there is any.
    """

    def __init__(
        self,
        settings: Settings,
        report: Callable[[str], None] = log.info,
        worker_path: str = WORKER_PATH,
        before_stop: Callable[["LocalCluster"], None] = lambda cluster: None,
    ) -> None:
        """Start nothing yet.

        Args:
            settings: of router, workers and Ray.
            report: takes a line whenever something has changed.
            worker_path: the class of the workers.
            before_stop: called when it begins to stop, also by itself: signals must not raise then.
        """
        self.settings = settings
        self.faults: list[str] = []
        self._before_stop = before_stop
        self._report = report
        self._worker_path = worker_path
        self._folder: RunFolder | None = None
        self._router: Child | None = None
        self._supervisor: Supervisor | None = None
        self._ray: dict[ProcessId, str] = {}
        """Processes without which Ray does not go on, with their names."""
        self._gcs: dict[ProcessId, str] = {}
        """While Ray starts: what ran last, also where it has ended."""
        self._watch: RayWatch | None = None
        self._before: set[ProcessId] = set()
        self._interrupted = False

    @property
    def url(self) -> str:
        """Base URL of the HTTP front."""
        host, _, _ = local_router_address(self.settings).rpartition(":")
        return f"http://{host}:{self.settings.router.http_port}"

    @property
    def admin_url(self) -> str:
        """Base URL of the pages for operators."""
        host = reachable_host(self.settings.router.admin_host)
        return f"http://{host}:{self.settings.router.admin_port}"

    @property
    def grpc_address(self) -> str:
        """host:port of the router's gRPC service."""
        return local_router_address(self.settings)

    @property
    def workers(self) -> list[WorkerState]:
        """Last known state of every worker."""
        return self._supervisor.workforce.states if self._supervisor is not None else []

    @property
    def router_pid(self) -> int:
        """Process of the router.

        Raises:
            ConfigError: not started.
        """
        return self._started()[1].pid

    @property
    def child_pids(self) -> set[int]:
        """Children of this process whose exit codes are asked for here."""
        return {self.router_pid, *(process.pid for process in self._ray)}

    def start(self) -> None:
        """Start router, Ray and workers; returns when requests can be served.

        Everything is stopped again when this raises.

        Raises:
            ConfigError: settings, checkpoint or ports cannot be used, or a part ended.
            ExpiredError: not ready after ``cluster.start_timeout_s``.
        """
        if self._folder is not None:
            raise ConfigError("the cluster is started already")
        if self.settings.cluster.ray_address:
            raise ConfigError("a Ray cluster is given", param="cluster.ray_address")
        self.settings = with_hash_key(self.settings, os.environ)
        router_options(self.settings)  # a bad checkpoint is reported before anything starts
        _refuse_few_tasks(num_workers(self.settings))
        self.settings = decide_ports(self.settings)
        check = read_weights if self.settings.worker.engine == "vllm" else check_files
        check(self.settings.model.dir)  # as a worker does, half a minute later
        adopt_orphans()
        self._before = find_children(os.getpid())
        self._folder = RunFolder()
        try:
            self.settings = with_certificates(self.settings, self._folder.path, self._report)
            self._start(self._folder)
        except KeyboardInterrupt:
            self._report("interrupted, stopping")
            self._interrupted = True
            self.stop()
            raise
        except BaseException:
            self.faults.append("not started")
            self.stop()
            raise

    def poll(self) -> None:
        """Look at every part once; about half a second.

        Workers that end are started again.

        Raises:
            ConfigError: the router ended, or a part of Ray, or nothing was started.
        """
        self._started()[1].check()
        self._check_ray()
        if self._supervisor is not None:
            with self._calls_ray():
                self._supervisor.poll()

    def stop(self) -> None:
        """Stop router, workers and Ray in this order, then make sure that nothing is left.

        The router lets requests that run end, for ``router.drain_timeout_ms`` at most. Does nothing
        when nothing was started.
        """
        self._before_stop(self)
        folder = self._folder
        if folder is None:
            return
        timeout_s = self.settings.cluster.stop_timeout_s
        if self._supervisor is not None:
            self._supervisor.close()  # that the router does not answer any more is no fault
        if self._router is not None:
            try:
                self._router.stop(self.settings.router.drain_timeout_ms / 1000 + timeout_s)
            except DisaggError as error:
                self.faults.append(error.message)
        if self._supervisor is not None:
            if self._interrupted:
                self._supervisor.hurry()  # else workers start, so as to hear that they are to end
            try:
                with self._calls_ray():
                    self._supervisor.stop()
            except Exception as error:  # whatever it is, the processes still have to end
                if str(error) not in self.faults:
                    self.faults.append(f"workers: {error}")
        try:
            with self._calls_ray():
                stop_ray()
        except Exception as error:  # its library's files may have been replaced under it
            self.faults.append(f"Ray: {error}")
        # Of a start that was interrupted Ray ends nothing, and nothing there is worth a wait.
        killed = end_processes(self._find_ours(), _KILL_S if self._interrupted else timeout_s)
        if killed and not self._interrupted:  # what only begins to start hears nothing yet
            pids = ", ".join(str(process.pid) for process in killed)
            self.faults.append(f"processes {pids} had to be killed")
        self._folder, self._router, self._supervisor = None, None, None
        self._ray, self._gcs = {}, {}
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        remove_keys(folder.path / CERTIFICATES)  # also where the logs stay
        has_logs = any(one.is_file() for one in folder.path.rglob("*"))
        if self.faults:
            where = f" (logs in {folder.path})" if has_logs else ""
            self._report(f"{'; '.join(self.faults)}{where}")
        if not (self.faults and has_logs):
            folder.remove()

    def hurry(self) -> None:
        """Let nothing that runs end any more; for a signal handler, while `stop` runs."""
        if self._router is not None:
            self._router.hurry()

    def __enter__(self) -> Self:
        """Start; see `start`."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop; see `stop`."""
        self.stop()

    def _started(self) -> tuple[RunFolder, Child]:
        if self._folder is None or self._router is None:
            raise ConfigError("the cluster is not started")
        return self._folder, self._router

    def _find_ours(self) -> set[ProcessId]:
        """All that was started for this cluster and runs, also what has lost its parent."""
        return find_descendants(find_children(os.getpid()) - self._before)

    def _find_parts(self) -> dict[ProcessId, str]:
        """Without which a call of Ray's library waits in vain; a raylet that it starts may end."""
        if not self._ray:
            found = named(find_children(os.getpid()) - self._before, (_GCS,))
            running = {process: name for process, name in found.items() if is_alive(process)}
            self._gcs = running or self._gcs or found
        return self._ray or self._gcs

    def _check_ray(self) -> None:
        """Do nothing while Ray runs; without one of its parts calls of its library wait for it.

        Raises:
            ConfigError: a part has ended.
        """
        for process, name in self._ray.items():
            if not is_alive(process):
                code = exit_code(process)
                how = f"killed, {MEMORY}?" if code is None else f"it {how_it_ended(code)}"
                log = f", see its logs/{name}.out" if code is not None and code >= 0 else ""
                fault = f"Ray's {name} has ended{tight_limits()}; {how}{log}"
                if fault not in self.faults:
                    self.faults.append(fault)  # a fault, so that its logs stay
                raise ConfigError(fault)

    def _calls_ray(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._watch is None else self._watch.calls()

    def _give_up(self, reason: str) -> None:
        """End everything, and this process; of another thread, as Ray holds the one that would."""
        folder = self._folder
        if folder is None:
            return  # just now it has come back
        end_processes(self._find_ours(), _KILL_S)
        remove_keys(folder.path / CERTIFICATES)
        self._report(f"{reason}{tight_limits()}; everything is ended (logs in {folder.path})")
        os._exit(1)

    def _start(self, folder: RunFolder) -> None:
        deadline = time.monotonic() + self.settings.cluster.start_timeout_s
        self._router = self._start_router(folder)
        self._report("starting Ray on this machine")
        self._watch = RayWatch(self._give_up, self._find_parts)
        timeout_s = self.settings.cluster.start_timeout_s + _RAY_START_S
        late = f"Ray has not started after {timeout_s:g} s"
        with self._watch.calls(timeout_s, late, _GCS_PATIENCE_S):
            start_ray(self.settings, folder.path / "ray")
        self._ray = named(find_children(os.getpid()), _RAY_PARTS)
        self._wait_for_router("/health", deadline)
        from disagg.cluster.supervise import Supervisor  # imports Ray, whose environment is set now

        self._supervisor = Supervisor(
            self.settings, self._report, self._worker_path, confirm=self._check_ray
        )
        with self._calls_ray():
            self._supervisor.start()
            self._supervisor.wait()
        self._wait_for_router("/ready", deadline)

    def _start_router(self, folder: RunFolder) -> Child:
        text = yaml.safe_dump(self.settings.model_dump(mode="json"))
        path = folder.write("settings.yaml", text)
        command = [sys.executable, "-m", "disagg.commands", "router", "--config", str(path)]
        self._report(f"starting the router on {self.url}")
        return Child(
            "router", [*command, f"--end-with-parent={os.getpid()}"], folder.path / "router.log"
        )

    def _wait_for_router(self, path: str, deadline: float) -> None:
        _, router = self._started()
        while True:
            router.check()
            status, body = get(self.url, path)
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise ExpiredError(f"the router's {path} is not 200 in time: {status} {body}")
            time.sleep(_POLL_S)


def _refuse_few_tasks(num_workers: int) -> None:
    """Raise ConfigError where a limit of the system does not let so many workers start."""
    found, needed = tasks_left(), _TASKS + _TASKS_PER_WORKER * num_workers
    if found is not None and found[0] < needed:
        left, limit = found
        raise ConfigError(
            f"only {max(0, left)} more processes and threads may be started here: {limit}; Ray, the"
            f" router and {num_workers} workers take {needed} and more"
        )


def get(url: str, path: str) -> tuple[int, str]:
    """Status and body of one GET; status 0 and the reason when nobody answers."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(10_000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
