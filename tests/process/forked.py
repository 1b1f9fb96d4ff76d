"""Processes forked from one that has imported everything: starting takes no seconds of imports.

Each is a process of its own, with its own standard streams, agents and end, as one started from the
command line is; what they share is the copy-on-write memory of imported modules.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from multiprocessing.connection import Connection
from typing import IO

from tests.conftest import REQUIRED

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "tests.process.worker_main",
    "tests.process.router_main",
    "tests.process.worker_process",
    "tests.process.router_process",
    "tests.process.transport_node",
]
if os.environ.get(REQUIRED):
    _PRELOADED.append("tests.process.vllm_preload")
_CONTEXT.set_forkserver_preload(_PRELOADED)


class Forked:
    """The part of ``subprocess.Popen`` that the tests use, for ``python -m module argument``.

    Args:
        module: run as ``__main__``.
        argument: its only one.
        environment: all its variables. The modules were imported with those of the first start.
        log_path: its standard error is appended there.
    """

    def __init__(
        self, module: str, argument: str, environment: dict[str, str], log_path: str
    ) -> None:
        child_in, our_in = _CONTEXT.Pipe(duplex=False)
        our_out, child_out = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run, args=(module, argument, environment, child_in, child_out, log_path)
        )
        self._process.daemon = True  # ends with us, whatever happens
        self._process.start()
        child_in.close()
        child_out.close()
        self.stdin: IO[str] = _as_file(our_in, "w")
        self.stdout: IO[str] = _as_file(our_out, "r")

    @property
    def pid(self) -> int:
        """Process id, also after the end."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code once it has ended; negative for a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise ``subprocess.TimeoutExpired`` if it does not come."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _as_file(connection: "Connection[object, object]", mode: str) -> IO[str]:
    file: IO[str] = os.fdopen(os.dup(connection.fileno()), mode)
    connection.close()
    return file


def _run(
    module: str,
    argument: str,
    environment: dict[str, str],
    stdin: "Connection[object, object]",
    stdout: "Connection[object, object]",
    log_path: str,
) -> None:
    multiprocessing.current_process().daemon = False  # it may start processes: vLLM its ranks
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    stdin.close()
    stdout.close()
    sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, argument]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module has been imported before
        runpy.run_module(module, run_name="__main__")
