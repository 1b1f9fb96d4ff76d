"""A child process with a log file, ended in order."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError, ExpiredError

_POLL_S = 0.05
_TAIL_LINES = 15
MEMORY = "most often by the kernel for lack of memory; see dmesg"
"""Behind that a process was killed, which says nothing itself."""


class Child:
    """One process started here. It has its own process group, so Ctrl-C reaches only us."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path | None,
        inherits: Sequence[int] = (),
    ) -> None:
        """Start it; without a log file it writes where this process does.

        Args:
            name: of the process, for messages.
            command: that it runs.
            log_path: what its output is added to.
            inherits: file descriptors that it has as well, by the same numbers.
        """
        self.name = name
        self.log_path = log_path
        self._killed = False
        # The child gets its settings in a file; variables would override them a second time.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DISAGG_")}
        with contextlib.ExitStack() as opened:
            sink = None if log_path is None else opened.enter_context(log_path.open("ab"))
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environ,
                process_group=0,
                pass_fds=tuple(inherits),
            )

    @property
    def pid(self) -> int:
        """Process id, also after the end."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Of a process that has ended."""
        return self._process.poll()

    @property
    def end(self) -> str:
        """How it has ended, in words that follow its name."""
        code = self.exit_code
        return how_it_ended(code or 0, MEMORY if not self._killed else "")

    def check(self) -> None:
        """Do nothing while it runs.

        Raises:
            ConfigError: it ended; the message holds the end of its log.
        """
        if self.ended:
            raise ConfigError(f"{self.name} {self.end}:\n{self.tail()}")

    def tail(self) -> str:
        """Last lines of the log."""
        if self.log_path is None:
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if not self.ended:
            self._killed = number == signal.SIGKILL
            self._process.send_signal(number)

    def hurry(self) -> None:
        """Send SIGTERM, which is the second one where `stop` waits: the process ends at once."""
        if not self.ended:
            self._process.terminate()

    def stop(self, timeout_s: float) -> None:
        """End the process by SIGTERM; kill it when it has not ended after ``timeout_s``.

        Raises:
            ExpiredError: it had to be killed.
        """
        if self.ended:
            return
        self._process.terminate()
        deadline = time.monotonic() + timeout_s
        while not self.ended and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not self.ended:
            self._process.kill()
            self._process.wait()
            raise ExpiredError(f"{self.name} did not stop in {timeout_s:g} s and was killed")


def how_it_ended(code: int, killer: str = MEMORY) -> str:
    """In words that follow the name of a process.

    Args:
        code: its exit code; below 0 the signal that ended it, as `subprocess` has it.
        killer: who may have killed it, where that is not known otherwise.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "was killed (signal 9)" + (f": {killer}" if killer else "")
    try:
        name = f"{signal.Signals(-code).name}, "
    except ValueError:  # a real-time one
        name = ""
    return f"was ended by {name}signal {-code}"
