"""The folder of one run: made, written to, removed."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from disagg.errors import ConfigError
from disagg.workers.left_folders import hold, identity, remove_left

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
        remove_left(PARENT, PREFIX, time.time(), LEFT_S)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
        except OSError as error:
            raise ConfigError(f"{PARENT}: {error.strerror}") from error
        self._made = identity(self.path)
        self._held = hold(self.path)

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
            and identity(self.path) == self._made
        )
        if not made_here:
            raise RuntimeError(f"{self.path} is not the folder of this run; nothing is removed")
        os.close(self._held)
        shutil.rmtree(self.path)
