"""The folder of one run, and the only place of the project that removes a folder."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from disagg.errors import ConfigError

PARENT = Path("/tmp")
"""Not TMPDIR: Ray's socket paths must stay below 108 bytes."""
PREFIX = "disagg-run-"
LEFT_S = 24 * 3600.0
"""So long what a killed run has left stays, for who wants to read its logs."""


class RunFolder:
    """A new folder for sockets, logs and settings of one run; only we can read it.

    Attributes:
        path: absolute, directly below ``PARENT``.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            ConfigError: there is no room for it, or it may not be made.
        """
        remove_left(time.time())
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
        except OSError as error:
            raise ConfigError(f"{PARENT}: {error.strerror}") from error
        self._made = _identity(self.path)
        # systemd-tmpfiles removes what nobody touched for days, but nothing that is locked.
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._held, fcntl.LOCK_SH)

    def write(self, name: str, text: str) -> Path:
        """Leave a file there; returns its path.

        Raises:
            ConfigError: it cannot be written.
        """
        path = self.path / name
        try:
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        return path

    def remove(self) -> None:
        """Remove the folder with everything in it.

        A clean-up once took a path that was never set for the folder of the run, and removed the
        user's working directory. So this removes nothing but the very folder it made.

        Raises:
            RuntimeError: the path does not lead to that folder.
            OSError: it could not be removed.
        """
        made_here = (
            self.path.is_absolute()
            and self.path.parent == PARENT
            and self.path.name.startswith(PREFIX)
            and not self.path.is_symlink()
            and _identity(self.path) == self._made
        )
        if not made_here:
            raise RuntimeError(f"{self.path} is not the folder of this run; nothing is removed")
        os.close(self._held)
        shutil.rmtree(self.path)


def remove_left(now_s: float) -> None:
    """Remove the folders that this user's runs have left: killed ones, and those with faults.

    Only what no run holds any more, and in which nothing was written for ``LEFT_S``.

    Args:
        now_s: Unix time, as files have it.
    """
    for path in PARENT.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another start removes it, or may do so itself
            _remove_one_left(path, now_s)


def _remove_one_left(path: Path, now_s: float) -> None:
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(held)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return  # not as we make them
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its run goes on
        written = [status.st_mtime, *(os.lstat(one).st_mtime for one in path.iterdir())]
        if now_s - max(written) > LEFT_S and _identity(path) == (status.st_dev, status.st_ino):
            shutil.rmtree(path, ignore_errors=True)  # follows no links
    finally:
        os.close(held)


def _identity(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
