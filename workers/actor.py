"""The Ray actor around one worker: its process starts, answers and ends with it."""

import importlib
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from disagg.errors import ConfigError
from disagg.messages.identity import Incarnation
from disagg.telemetry.garbage_collector import spare_garbage_collector
from disagg.telemetry.log_format import configure_logging
from disagg.telemetry.open_files import allow_files
from disagg.workers.options import WorkerOptions
from disagg.workers.router_discovery import RoutersOfCluster
from disagg.workers.signals import drain_on_signals
from disagg.workers.transfer_network import set_transfer_environment

WORKER_PATH = "disagg.workers.worker:Worker"
NODE_HOST = "node"
"""Value of ``host``: the address under which Ray knows the node the worker runs on."""
FAILED_EXIT_CODE = 70
_TOLD_S = 2.0
"""The supervisor asks twice a second, and ends the process of a worker that has drained."""
ROUTER_DIRECTORY = "disagg-routers"
"""Name of the actor that knows the routers (`disagg/cluster/router_directory.py`)."""
DIRECTORY_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class HostedWorker(Protocol):
    """What the actor needs of a worker."""

    incarnation: Incarnation
    summary: str
    address: str
    failed: str
    role: str
    """To be set at any time."""
    routers_of_cluster: RoutersOfCluster | None

    @property
    def registrations(self) -> Mapping[str, str]:
        """Why a router does not have it, by the router's address; "" of one that has."""

    def start(self) -> None:
        """Start the worker; return when it serves."""

    def wait_failed(self, timeout_s: float | None = None) -> bool:
        """Block until it failed or stopped."""

    def drain(self) -> None:
        """Take no new work, let what goes on end, then stop."""

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop serving; False when that took longer."""


@dataclass(frozen=True)  # no slots: what an actor of an older release leaves out has its default
class WorkerState:
    """State of an actor's worker; valid for the incarnation it names."""

    worker_id: str
    role: str
    epoch: str
    address: str
    node_id: str
    """Ray's name of its host."""
    pid: int
    summary: str
    """What it took of its machine."""
    refused: str
    """Why the options cannot be used, "" when the worker serves."""
    unregistered: str = ""
    """Why no router has it; "" when one has."""
    is_stopping: bool = False
    """It was asked to end, by whoever supervised it then."""
    has_drained: bool = False
    """It has ended in order, by a signal, a router's order or its own; its process ends too."""

    def __setstate__(self, state: Mapping[str, Any] | list[Any]) -> None:
        """Take a pickle, also of a release that had slots: the values alone, in their order."""
        if isinstance(state, list):
            names = (field.name for field in fields(self))
            state = dict(zip(names, state, strict=False))  # those that are new have their defaults
        self.__dict__.update(state)


class WorkerActor:
    """Starts the worker in this process. Another actor of the same worker is a new incarnation.

    A worker that fails takes its process with it: the end of the process is the only fence that
    ends its READs for certain, and the supervisor then starts the next incarnation.
    """

    def __init__(self, options: WorkerOptions, worker_path: str = WORKER_PATH) -> None:
        configure_logging(
            options.log_format,
            f"%(asctime)s %(levelname)s {options.worker_id} %(name)s: %(message)s",
            {"worker_id": options.worker_id, "role": options.role},
        )
        allow_files()  # several for each worker that it exchanges KV with
        if options.host == NODE_HOST:
            import ray  # reads its environment when imported, which has to be complete by then

            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            options = replace(options, host=host)
        set_transfer_environment(options)
        module, _, name = worker_path.partition(":")
        self._options = options
        self._worker: HostedWorker = getattr(importlib.import_module(module), name)(options)
        self._worker.routers_of_cluster = routers_of_cluster
        self._stopping = threading.Event()
        self._has_drained = False
        self._refused = ""
        try:
            self._worker.start()
        except ConfigError as error:
            # Raising would reach the supervisor as a traceback in a text; this as a sentence.
            self._refused = error.message
            return
        drain_on_signals(self._worker)
        spare_garbage_collector()
        threading.Thread(target=self._end_with_worker, name="worker-watch", daemon=True).start()

    def describe(self) -> WorkerState:
        """State of the worker; also the sign of life that the supervisor awaits."""
        import ray

        return WorkerState(
            worker_id=self._options.worker_id,
            role=self._worker.role,
            epoch=self._worker.incarnation.epoch,
            address=self._worker.address,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            summary=self._worker.summary,
            refused=self._refused,
            unregistered=why_unregistered(self._worker.registrations),
            is_stopping=self._stopping.is_set(),
            has_drained=self._has_drained,
        )

    def set_role(self, role: str) -> WorkerState:
        """Let the worker have another role from its next heartbeat on; its state with it.

        Routers then plan no new work of the old one there. What goes on ends as it began: a worker
        can do either at any time.
        """
        log.info("worker %s takes the role %s", self._options.worker_id, role)
        self._worker.role = role
        return self.describe()

    def stop(self, timeout_s: float, drain_s: float = 0.0) -> bool:
        """Stop serving, after what goes on has ended or ``drain_s`` are over.

        False when it took longer. The actor is to be killed afterwards.
        """
        self._stopping.set()
        if self._refused:
            return True
        if drain_s:
            self._worker.drain()
            self._worker.wait_failed(drain_s)
        return self._worker.stop(timeout_s)

    def _end_with_worker(self) -> None:
        self._worker.wait_failed()
        if self._stopping.is_set():
            return
        if self._worker.failed:
            log.error("worker failed, process ends: %s", self._worker.failed)
        else:
            log.info("worker has drained, process ends")
            self._has_drained = True
            time.sleep(_TOLD_S)
        logging.shutdown()
        os._exit(FAILED_EXIT_CODE if self._worker.failed else 0)


def why_unregistered(answers: Mapping[str, str]) -> str:
    """Why no router has a worker, by what each has answered; "" when one has."""
    if not all(answers.values()):
        return ""
    said = [f"router {address}: {answer}" for address, answer in sorted(answers.items())]
    return "; ".join(said) or "it knows of no router"


def routers_of_cluster() -> Collection[str]:
    """host:port of the routers that have announced themselves in the Ray cluster."""
    import ray

    directory = ray.get_actor(ROUTER_DIRECTORY)
    found: list[str] = ray.get(directory.addresses.remote(), timeout=DIRECTORY_TIMEOUT_S)
    return found
