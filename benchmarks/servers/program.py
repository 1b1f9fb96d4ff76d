"""A program that serves HTTP, with its log and all processes that descend from it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from disagg.cluster.processes import ProcessId, end_processes, find_descendants, read_process

START_S, END_S = 900.0, 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UCX_NET_DEVICES": "lo",
    "HF_HUB_OFFLINE": "1",
}
"""Of every program, where its own does not say otherwise."""


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Program:
    """One program, started at once; ended by the process ids that it started.

    Attributes:
        url: where it serves.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], log: Path, url: str
    ) -> None:
        self.url = url
        self._command, self._log = command, log
        self._environment = os.environ | ENVIRONMENT | environment
        self.start()

    def start(self) -> None:
        """Start it, or after its end start it again; `wait_ready` waits for it."""
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )
        found = read_process(self._popen.pid)
        assert found is not None
        self._identity = found[0]

    def wait_ready(self) -> None:
        """Wait until it is healthy.

        Raises:
            RuntimeError: it has ended, with the end of its log, or is not healthy in time.
        """
        self.wait_until(lambda: httpx.get(f"{self.url}/health", timeout=5).status_code == 200)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that is asked over HTTP; raises as `wait_ready` does."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self._log.name} has ended:\n{tail}")
            with contextlib.suppress(httpx.TransportError):
                if holds():
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{self._log.name} does not serve; see {self._log}")

    def processes(self) -> set[ProcessId]:
        """It and all that descend from it."""
        return find_descendants({self._identity})

    def cpu_s(self) -> float:
        """CPU seconds of all of them, and of their ended children, so far."""
        total = 0
        for process in self.processes():
            try:
                text = Path(f"/proc/{process.pid}/stat").read_text()
            except OSError:
                continue
            total += sum(map(int, text[text.rindex(")") + 2 :].split()[11:15]))
        return total / TICKS_PER_S

    def stop(self) -> None:
        """SIGSTOP to what it started; itself goes on accepting requests."""
        self._signal(self.processes() - {self._identity}, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(self.processes(), signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all of them, as a crash of the container would."""
        processes = self.processes()
        self._signal(processes, signal.SIGKILL)
        end_processes(processes, timeout_s=END_S)  # a moment later they are gone
        self._popen.wait(END_S)

    def end(self) -> None:
        """SIGTERM, then SIGKILL for what is left."""
        self.resume()
        processes = self.processes()
        self._popen.terminate()
        end_processes(processes, timeout_s=END_S)
        self._popen.wait(END_S)

    def _signal(self, processes: set[ProcessId], number: int) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number)


if sys.platform != "linux":
    raise SystemExit("processes are read from /proc: Linux only")
