"""Bytes and files of a directory, counted by all processes that write to it."""

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
import time
from collections.abc import Iterator

LOCK_WAIT_S = 1.0
"""Somebody may be stopped while he has the lock: then nothing is counted."""
LOCK_RETRY_S = 0.002
_NUMBERS = struct.Struct("<QQ")


class SharedCount:
    """Two numbers in a file, to be read and set under its lock.

    The lock holds against other processes and other threads, and ends with the process that has it.
    A file that was deleted, or moved away with its directory, is opened anew, and nobody has
    counted in it: who comes later has no other one.

    Args:
        path: of the file.
        create: whether to make it, for this user alone.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, *, create: bool) -> None:
        flags = (os.O_RDWR | os.O_CREAT if create else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = path
        self._open = functools.partial(os.open, path, flags, 0o600)
        self._fd = self._open()
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock; False in vain, after `LOCK_WAIT_S`."""
        end_s = time.monotonic() + LOCK_WAIT_S
        if not self._mutex.acquire(timeout=LOCK_WAIT_S):
            yield False
            return
        try:
            while not (locked := self._try_lock()) and time.monotonic() < end_s:
                time.sleep(LOCK_RETRY_S)
            try:
                yield locked
            finally:
                if locked:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def get(self) -> tuple[int, int] | None:
        """Bytes and files; None where nobody has counted."""
        data = os.pread(self._fd, _NUMBERS.size, 0)
        if len(data) < _NUMBERS.size:
            return None
        num_bytes, num_files = _NUMBERS.unpack(data)
        return num_bytes, num_files

    def set(self, num_bytes: int, num_files: int) -> None:
        """Say how many there are now."""
        os.pwrite(self._fd, _NUMBERS.pack(num_bytes, num_files), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
                return False
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(self._path)):
                return True
        opened = self._open()
        os.close(self._fd)
        self._fd = opened
        return False
