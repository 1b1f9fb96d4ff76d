"""A small file that a setting names: read whole and at once, or refused with the reason."""

import errno
import os
import stat
from pathlib import Path

FILE_BYTES_MAX = 1 << 20


def expanded(path: str | Path) -> Path:
    """A path without its ``~``.

    Raises:
        OSError: there is no such user, or nobody knows where this one's home is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise OSError(errno.ENOENT, "no home directory is known for it") from None


def read_given(path: str | Path) -> tuple[bytes, int]:
    """A file's contents and mode, of one moment: it may be replaced at any.

    Raises:
        OSError: it cannot be read, is larger than ``FILE_BYTES_MAX``, or is no file: a pipe would
            wait for a writer, and could be read once only, while most files are read again.
    """
    try:
        with open(expanded(path), "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "is no file that can be read again")
            data = file.read(FILE_BYTES_MAX + 1)
    except ValueError:  # a NUL in the path
        raise OSError(errno.EINVAL, "is no path") from None
    if len(data) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"larger than {FILE_BYTES_MAX} bytes")
    return data, mode


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
