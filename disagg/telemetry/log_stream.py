"""Lines to a stream whose reader may stand still: one is left out rather than waited for."""

import contextlib
import logging
import select
from typing import TextIO

WAIT_MS = 100
"""For a reader that is only slow; the next line waits for nothing until one has been taken."""


class LogStream:
    """Writes lines where that does not block: who serves does not stand still as nobody reads.

    That is a pipe that is full, or a terminal after Ctrl-S. Files always take lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_left_out = 0
        self._poll: select.poll | None = None
        with contextlib.suppress(OSError, ValueError):  # no file of the system, so it never blocks
            number = stream.fileno()
            self._poll = select.poll()
            self._poll.register(number, select.POLLOUT)

    def write_line(self, line: str) -> None:
        """Write a line, after the number of those that were left out before it."""
        wait_ms = 0 if self._num_left_out else WAIT_MS
        if self._poll is not None and not self._poll.poll(wait_ms):
            self._num_left_out += 1
            return
        if self._num_left_out:
            line = f"({self._num_left_out} lines left out: nobody read them)\n{line}"
            self._num_left_out = 0
        with contextlib.suppress(OSError):  # no reason to end: nobody will read it any more
            print(line, file=self._stream, flush=True)


class LogStreamHandler(logging.Handler):
    """Log records to a `LogStream`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = LogStream(stream)

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, if its stream takes a line."""
        try:
            self._stream.write_line(self.format(record))
        except Exception:  # as the handlers of `logging` do
            self.handleError(record)
