"""A directory of blocks: a file each, a folder per contract, bounds that all its users share."""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ConfigError
from disagg.workers.tiers.options import PARAM
from disagg.workers.tiers.shared_count import SharedCount
from disagg.workers.tiers.stored_block import (
    CONTRACT_FILE,
    StoredBlock,
    block_name,
    is_contract_name,
    parse_block_name,
)

LOCK_FILE = "lock"
"""Locked while blocks are counted; holds how many bytes and files there are, at most."""
PARTIAL_PREFIX = "partial-"
PARTIAL_OLD_NS = 600 * 10**9
"""A file that was begun so long ago is nobody's any more: its writer was killed."""
CLOCKS_APART_NS = 3600 * 10**9
"""A file last used later than this from now was used by a clock that was wrong: it counts as the
oldest. By its time it would be the newest for years, and all that is written meanwhile would go
before it."""
REMOVED_AT_ONCE = 1000
"""Files under one lock: others want to write meanwhile."""
SLACK = 16
"""One sixteenth of a full store is given up besides, for it takes a look at every file."""
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""No links, and no waiting for the other end of a pipe that somebody put there."""
_BEGIN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class _File:
    """A file of ours; ``block`` is None for one that was begun and not ended."""

    path: str
    block: StoredBlock | None
    num_bytes: int
    used_ns: int


class DiskStore:
    """All blocks in a directory, of every contract; implements `Store`.

    Several processes may use one directory. A block appears whole, by a rename, and is never
    changed; so readers need no lock. What all of them have written is counted under a file lock,
    which ends with the process that has it. No file gets its name, or is taken off the count,
    outside that lock: whoever looks at the directory to count would miss it, or take it off twice.
    Blocks are not flushed to the device: what a power failure leaves of one has another checksum.

    Args:
        place: the directory; made, for this user alone, if it does not exist.
        create: whether to make it.
        clock_ns: time since 1970.

    Raises:
        ConfigError: it is not there, not this user's, or others may write to it.
    """

    def __init__(
        self, place: str, *, create: bool = True, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.place = place
        self._clock_ns = clock_ns
        if create:
            make_folder(place)
        try:
            _check_folder(place)
            self._count = SharedCount(os.path.join(place, LOCK_FILE), create=create)
        except FileNotFoundError:
            raise ConfigError(f"{place} is not a store of KV blocks", param=PARAM) from None
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror or error}", param=PARAM) from error

    # --- paths

    def folder(self, contract_name: str) -> str:
        """Where the blocks of a contract are."""
        return os.path.join(self.place, contract_name)

    def path(self, contract_name: str, name: str) -> str:
        """Where a block is, by its name."""
        return os.path.join(self.place, contract_name, name)

    def add_contract(self, contract_name: str, text: str) -> None:
        """Make the folder of a contract, with what it is; raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder(contract_name), 0o700)
        if self._read_contract(contract_name) != text:
            data = text.encode()
            partial = self._begin(contract_name, len(data))
            try:  # without the lock: nobody counts it, and no start waits for who keeps it
                self._fill(partial, [data])
                os.rename(partial, self.path(contract_name, CONTRACT_FILE))
            except OSError:
                os.unlink(partial)
                raise

    # --- blocks

    def put(self, partial: str, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Fill a file that was begun, and give it its name: whole, or OSError and not at all."""
        self._fill(partial, parts)
        with self._count.locked() as locked:
            if not locked:
                raise BlockingIOError(errno.EAGAIN, "somebody keeps the store locked")
            os.rename(partial, os.path.join(os.path.dirname(partial), name))

    def touch(self, file: str | int) -> None:
        """Remember that a block, by path or open file, was used now."""
        now_ns = self._clock_ns()
        with contextlib.suppress(OSError):  # gone, or not ours to touch: so it is older
            os.utime(file, ns=(now_ns, now_ns))

    def begin(
        self, contract_name: str, num_files: int, file_bytes: int, bytes_max: int, files_max: int
    ) -> tuple[list[str], list[StoredBlock]] | None:
        """Begin files, giving up others where there would be too many.

        What is begun has its full size from the start, so whoever looks counts it.

        Returns:
            The files, to be filled by `put`, and what was given up, least recently used first;
            None where there is no room for so much, or nobody could count.
        """
        num_bytes = num_files * file_bytes
        with self._count.locked() as locked:
            if not locked or num_bytes > bytes_max or num_files > files_max:
                return None
            used_bytes, used_files = self._counted()
            evicted: list[StoredBlock] = []
            if used_bytes + num_bytes > bytes_max or used_files + num_files > files_max:
                used_bytes, used_files, evicted = self._shrink(
                    bytes_max - num_bytes, files_max - num_files
                )
                if used_bytes + num_bytes > bytes_max or used_files + num_files > files_max:
                    self._count.set(used_bytes, used_files)  # what others have begun
                    return [], evicted
            # Counted before they are there: killed in between, there are fewer than counted.
            self._count.set(used_bytes + num_bytes, used_files + num_files)
            files: list[str] = []
            try:
                files.extend(self._begin(contract_name, file_bytes) for _ in range(num_files))
            except OSError:
                for file in files:
                    os.unlink(file)
                self._count.set(used_bytes, used_files)
                raise
            return files, evicted

    def discard(self, files: Sequence[str], file_bytes: int) -> None:
        """Remove files that were begun and not filled."""
        with contextlib.suppress(OSError):
            self._unlink([(file, file_bytes) for file in files])

    def shrink(self, bytes_max: int, files_max: int) -> list[StoredBlock] | None:
        """Count anew, and give up the least recently used blocks where there are more.

        Returns:
            What was given up; None where another process keeps the store locked.
        """
        with self._count.locked() as locked:
            if not locked:
                return None
            used_bytes, used_files, evicted = self._shrink(bytes_max, files_max, slack=False)
            self._count.set(used_bytes, used_files)
            return evicted

    def num_files(self) -> int:
        """Files there are, at most."""
        with self._count.locked():
            return self._counted()[1]

    # --- what anybody may ask: see `Store`

    def blocks(self) -> Iterator[StoredBlock]:
        """See `Store.blocks`."""
        try:
            for file in self._files():
                if file.block is not None:
                    yield file.block
        except OSError as error:
            raise self._failed(error) from error

    def contract(self, contract_name: str) -> str:
        """See `Store.contract`."""
        return self._read_contract(contract_name)

    def load(self, block: StoredBlock) -> bytes:
        """See `Store.load`."""
        try:
            fd = os.open(self.path(block.contract_name, block_name(block.key)), READ_FLAGS)
            with open(fd, "rb") as file:
                return file.read(block.num_bytes)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._failed(error) from error

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        """See `Store.remove`."""
        files = [(self.path(b.contract_name, block_name(b.key)), b.num_bytes) for b in blocks]
        try:
            return sum(
                self._unlink(files[first : first + REMOVED_AT_ONCE])
                for first in range(0, len(files), REMOVED_AT_ONCE)
            )
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """See `Store.close`."""
        self._count.close()

    # --- inside

    def _begin(self, contract_name: str, num_bytes: int) -> str:
        path = self.path(contract_name, PARTIAL_PREFIX + secrets.token_hex(8))
        fd = os.open(path, _BEGIN_FLAGS, 0o600)
        try:
            os.ftruncate(fd, num_bytes)
            now_ns = self._clock_ns()
            os.utime(fd, ns=(now_ns, now_ns))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return path

    def _fill(self, partial: str, parts: Sequence[bytes | memoryview]) -> None:
        fd = os.open(partial, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _write_all(fd, [memoryview(part) for part in parts])
            now_ns = self._clock_ns()
            os.utime(fd, ns=(now_ns, now_ns))
        finally:
            os.close(fd)

    def _files(self) -> Iterator[_File]:
        """Every file of ours; what others put there is neither counted nor touched."""
        try:
            folders = list(os.scandir(self.place))
        except FileNotFoundError:  # removed while we run, with all that was in it
            return
        ahead_ns = self._clock_ns() + CLOCKS_APART_NS
        for folder in folders:
            if not is_contract_name(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                yield from self._files_in(folder.name, ahead_ns)

    def _files_in(self, contract_name: str, ahead_ns: int) -> Iterator[_File]:
        for entry in os.scandir(self.folder(contract_name)):
            key = parse_block_name(entry.name)
            if key is None and not entry.name.startswith(PARTIAL_PREFIX):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode):
                continue
            size = found.st_size
            used_ns = found.st_mtime_ns
            if used_ns > ahead_ns:
                used_ns -= ahead_ns  # of 1970, in the order in which they were used
            block = key and StoredBlock(contract_name, key, size, used_ns)
            yield _File(entry.path, block or None, size, used_ns)

    def _shrink(
        self, bytes_max: int, files_max: int, *, slack: bool = True
    ) -> tuple[int, int, list[StoredBlock]]:
        """Under the lock: count anew, give up what is too much; returns what is left, and it."""
        files = sorted(self._files(), key=lambda file: file.used_ns)
        used_bytes, used_files = sum(file.num_bytes for file in files), len(files)
        over = used_bytes > bytes_max or used_files > files_max
        more = len(files) // SLACK if slack and over else 0
        old_ns = self._clock_ns() - PARTIAL_OLD_NS
        evicted = []
        for file in files:
            over = used_bytes > bytes_max or used_files > files_max
            if not (over or more > 0 if file.block else file.used_ns < old_ns):
                continue
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            more -= not over
            used_bytes, used_files = used_bytes - file.num_bytes, used_files - 1
            if file.block:
                evicted.append(file.block)
        return used_bytes, used_files, evicted

    def _unlink(self, files: Sequence[tuple[str, int]]) -> int:
        """Remove files, each with its bytes, and take them off the count; returns how many."""
        gone: list[int] = []
        with self._count.locked() as locked:
            # Before: where nobody has counted, what is there still is counted first.
            used_bytes, used_files = self._counted() if locked else (0, 0)
            try:
                for file, num_bytes in files:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file)
                        gone.append(num_bytes)
            finally:
                if locked:  # else more are counted than there are, until the next look
                    self._count.set(max(0, used_bytes - sum(gone)), max(0, used_files - len(gone)))
        return len(gone)

    def _counted(self) -> tuple[int, int]:
        """Bytes and files, at most so many; where nobody has counted, all there are."""
        if (counted := self._count.get()) is not None:
            return counted
        files = list(self._files())
        return sum(file.num_bytes for file in files), len(files)

    def _read_contract(self, contract_name: str) -> str:
        try:
            fd = os.open(self.path(contract_name, CONTRACT_FILE), READ_FLAGS)
            with open(fd, "rb") as file:
                return file.read(1 << 20).decode()
        except (OSError, UnicodeDecodeError):
            return ""

    def _failed(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self.place}: {error.strerror or error}", param="place")


def make_folder(place: str) -> None:
    """Make a directory for this user alone, unless it is there.

    Raises:
        ConfigError: it cannot be made, is not this user's, or others may write to it.
    """
    try:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700)
        _check_folder(place)
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror or error}", param=PARAM) from error


def _check_folder(place: str) -> None:
    found = os.stat(place)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{place} is not a directory", param=PARAM)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{place}: others may write to it, and so into the KV of prompts; it must belong to "
            "the user of the workers and be writable for nobody else (chmod 700)",
            param=PARAM,
        )


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        num_bytes = os.writev(fd, parts)
        while parts and num_bytes >= len(parts[0]):
            num_bytes -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][num_bytes:]
