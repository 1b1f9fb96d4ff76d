"""A worker without model and network, for tests of the shell around the real one."""

import secrets
import threading
import time
from pathlib import Path

from disagg.errors import ConfigError
from disagg.messages.identity import Incarnation
from disagg.workers.options import WorkerOptions


class StandInWorker:
    """Fails when the file ``fail-<worker id>`` appears in its model folder."""

    def __init__(self, options: WorkerOptions) -> None:
        self.incarnation = Incarnation(options.worker_id, secrets.token_hex(8))
        self.summary = "nothing of this machine"
        self.address = ""
        self.failed = ""
        self._options = options
        self._stopped = threading.Event()

    def start(self) -> None:
        if (Path(self._options.model_dir) / f"refuse-{self._options.worker_id}").exists():
            raise ConfigError("model.dir: this checkpoint is not to my taste")
        self.address = f"{self._options.host}:1"

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
