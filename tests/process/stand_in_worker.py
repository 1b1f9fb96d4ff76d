"""A worker without model and network, for tests of the shell around the real one."""

import secrets
import threading
import time
from pathlib import Path

from disagg.errors import ConfigError
from disagg.messages.identity import Incarnation
from disagg.workers.options import WorkerOptions
from disagg.workers.router_discovery import RoutersOfCluster


class StandInWorker:
    """Fails when the file ``fail-<worker id>`` appears in its model folder.

    It writes ``drained-<worker id>`` when it is asked to drain, and the routers that the cluster
    knows into ``routers-<worker id>``.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.incarnation = Incarnation(options.worker_id, secrets.token_hex(8))
        self.summary = "nothing of this machine"
        self.address = ""
        self.failed = ""
        self.role = options.role
        self.routers_of_cluster: RoutersOfCluster | None = None
        self.registrations: dict[str, str] = {"router": ""}
        self._options = options
        self._stopped = threading.Event()

    def start(self) -> None:
        if (Path(self._options.model_dir) / f"refuse-{self._options.worker_id}").exists():
            raise ConfigError("model.dir: this checkpoint is not to my taste")
        self.address = f"{self._options.host}:1"
        if (Path(self._options.model_dir) / "look-up").exists():
            threading.Thread(target=self._look_up, daemon=True).start()

    def _look_up(self) -> None:
        place = Path(self._options.model_dir) / f"routers-{self._options.worker_id}"
        assert self.routers_of_cluster is not None
        while not self._stopped.wait(0.1):
            try:
                found = " ".join(self.routers_of_cluster())
            except Exception as error:  # nobody has announced itself yet
                found = type(error).__name__
            fresh = place.with_suffix(".new")
            fresh.write_text(found)
            fresh.rename(place)

    def drain(self) -> None:
        (Path(self._options.model_dir) / f"drained-{self._options.worker_id}").touch()
        self._stopped.set()

    def wait_failed(self, timeout_s: float | None = None) -> bool:
        trigger = Path(self._options.model_dir) / f"fail-{self._options.worker_id}"
        while not self._stopped.is_set():
            if trigger.exists():
                trigger.unlink()
                self.failed = "it was asked to"
                return True
            time.sleep(0.05)
        return True

    def stop(self, timeout_s: float = 10.0) -> bool:
        self._stopped.set()
        return True
