"""Folders that a process makes for itself, and what killed ones have left of them."""

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path


def hold(folder: Path) -> int:
    """Keep a folder from `remove_left` until the file is closed, which a process's end does.

    systemd-tmpfiles removes what nobody touched for days, but nothing that is locked, either.

    Returns:
        An open file.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def remove_left(parent: Path, prefix: str, now_s: float, left_s: float) -> None:
    """Remove this user's folders that nobody holds, and in which nothing was written for a while.

    Args:
        parent: they lie in.
        prefix: of their names.
        now_s: Unix time, as files have it.
        left_s: that while; far longer than from a folder's making to its `hold`.
    """
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another start removes it, or may do so itself
            _remove_one_left(path, now_s, left_s)


def identity(path: Path) -> tuple[int, int]:
    """Which folder a path leads to; of a link, the link itself."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _remove_one_left(path: Path, now_s: float, left_s: float) -> None:
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(held)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return  # not as we make them
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its run goes on
        written = [status.st_mtime, *(os.lstat(one).st_mtime for one in path.iterdir())]
        if now_s - max(written) > left_s and identity(path) == (status.st_dev, status.st_ino):
            shutil.rmtree(path, ignore_errors=True)  # follows no links
    finally:
        os.close(held)
