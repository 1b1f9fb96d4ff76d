"""Files that commands write after long work: whole or not at all, and tried before the work."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from disagg.errors import ConfigError


def check_writable(path: Path, option: str) -> None:
    """Refuse, before anything is measured or simulated, a file that could not be written then.

    Raises:
        ConfigError: it is a folder, or its folder is missing or takes no files.
    """
    if not os.path.isdir(path.parent):  # of a name that is too long Path's own raises
        raise ConfigError(f"{option}: {path.parent} is no directory", param=option)
    if os.path.isdir(path):
        raise ConfigError(f"{option}: {path} is a directory", param=option)
    if _is_special(path):
        return
    beside = _beside(path)
    try:
        beside.write_bytes(b"")
        beside.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}", param=option) from None


def write_whole(path: Path, content: bytes, option: str) -> None:
    """Write a file so that whoever reads it finds the former one or all of this one.

    A pipe or a device is written to, and a link's target replaced, not the link.

    Raises:
        ConfigError: it cannot be written; what was there is as it was.
    """
    beside = _beside(path)
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        beside.write_bytes(content)
        beside.replace(_target(path))
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigError(f"{option}: {path}: {error.strerror}", param=option) from None


def _beside(path: Path) -> Path:
    """In the same folder, so that it can take the other's place; of this process alone."""
    target = _target(path)
    return target.with_name(f".{target.name}.{os.getpid()}.new")


def _target(path: Path) -> Path:
    """Where links lead; of one that leads to itself it is the link."""
    return Path(os.path.realpath(path))


def _is_special(path: Path) -> bool:
    """A pipe, a socket, a device: nothing may take its place."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
