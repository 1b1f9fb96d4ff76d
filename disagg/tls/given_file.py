"""A small file that a setting names: read at once or refused with the reason; replaced whole."""

import errno
import os
import secrets
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


def read_given(path: str | Path, bytes_max: int = FILE_BYTES_MAX) -> tuple[bytes, int]:
    """A file's contents and mode, of one moment: it may be replaced at any.

    Raises:
        OSError: it cannot be read, is larger than ``bytes_max``, or is no file: a pipe would wait
            for a writer, and could be read once only, while most files are read again.
    """
    try:
        with open(expanded(path), "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "is no file that can be read again")
            data = file.read(bytes_max + 1)
    except ValueError:  # a NUL in the path
        raise OSError(errno.EINVAL, "is no path") from None
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes")
    return data, mode


def write_given(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file, so that whoever reads it finds the former one or all of this one.

    Of a link the target is replaced: others may read it by its own name. The owner, the group and
    the mode stay: root may write what the processes of another user read.

    Args:
        path: of the file.
        content: all of it.
        mode: of a file that is new.

    Raises:
        OSError: it cannot be written, or would be another user's; what was there is as it was.
    """
    path = Path(os.path.realpath(path))
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(file, "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(file)
            if path.exists():
                former = path.stat()
                _give(file, path, former)
                os.fchmod(file, former.st_mode & 0o777)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _give(file: int, path: Path, former: os.stat_result) -> None:
    """Let those read it who could read the former one."""
    try:
        os.fchown(file, former.st_uid, former.st_gid)
    except PermissionError:
        if former.st_mode & stat.S_IROTH:
            return
        if os.fstat(file).st_gid == former.st_gid and former.st_mode & stat.S_IRGRP:
            return
        why = (
            f"it is of user {former.st_uid}, who could not read it any more: write it as that user"
        )
        raise PermissionError(errno.EPERM, why, str(path)) from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
