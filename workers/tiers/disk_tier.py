"""The tier on a local disk: plain files, read into the pool and checked there."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence

from disagg.errors import ConfigError
from disagg.scheduling.actions import TierKey
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.counts import Counts
from disagg.workers.tiers.disk_store import READ_FLAGS, DiskStore, make_folder
from disagg.workers.tiers.options import PARAM, TierOptions
from disagg.workers.tiers.protocol import Written
from disagg.workers.tiers.stored_block import (
    HEADER_BYTES,
    StoredBlock,
    block_name,
    header_of,
    why_not,
)

FILES_MAX = 1_000_000
"""Of a store, unless the option ``files`` says otherwise."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """Blocks of one contract in a `DiskStore`; implements `Tier`.

    Args:
        options: of the tier; ``place`` is the directory, which several workers may share. Where
            blocks lie in several ranks, each has a directory, and a bound, of its own in it.
        contract: whose blocks.
        clock_ns: time since 1970; the order of use outlives the process by it.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(
        self,
        options: TierOptions,
        contract: TierContract,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        options.refuse_others("files")
        files = options.others.get("files", str(FILES_MAX))
        if not options.place:
            raise ConfigError(f"{PARAM}: a disk tier needs a directory, disk:DIR", param=PARAM)
        if not (files.isascii() and files.isdigit() and int(files)):
            raise ConfigError(f"{PARAM}: files={files} is not a number of files", param=PARAM)
        self.name = options.name
        self.capacity_bytes = options.capacity_bytes
        self._files_max = max(1, int(files) // contract.num_ranks)
        self._lru = options.eviction == "lru"
        self._contract = contract
        self._size = HEADER_BYTES + contract.block_bytes
        self._counts = Counts(options.name)
        if self._size > self.capacity_bytes:
            raise ConfigError(
                f"{PARAM}: {options.name} has no room for one block of {self._size} bytes",
                param=PARAM,
            )
        if contract.num_ranks > 1:
            make_folder(options.place)
        self._store = DiskStore(contract.place_in(options.place), clock_ns=clock_ns)
        self._contract_name = contract.name
        self._folder = self._store.folder(contract.name)
        try:
            self._store.add_contract(contract.name, contract.as_json())
            self._store.shrink(self.capacity_bytes, self._files_max)
        except OSError as error:
            raise ConfigError(f"{options.place}: {error.strerror or error}", param=PARAM) from error

    def known(self) -> Sequence[TierKey]:
        """See `Tier.known`."""
        found = [b for b in self._store.blocks() if b.contract_name == self._contract.name]
        return [block.key for block in sorted(found, key=lambda block: block.used_ns)]

    def write(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> Written:
        """See `Tier.write`."""
        had = [key for key, _ in blocks if self._has(key)]
        new = [block for block in blocks if block[0] not in had]
        new = new[: min(self.capacity_bytes // self._size, self._files_max)]
        stored: set[TierKey] = set()
        lost: list[TierKey] = []
        try:
            if new:
                stored, lost = self._write_new(new)
        except (OSError, ConfigError) as error:
            self._counts.mishap("failed", error)
        has = stored.union(had).difference(lost)
        return Written(tuple(key for key, _ in blocks if key in has), tuple(lost))

    def read(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> tuple[bool, ...]:
        """See `Tier.read`."""
        header = bytearray(HEADER_BYTES)
        return tuple(self._get(key, view, header) for key, view in blocks)

    def forget(self, keys: Sequence[TierKey]) -> None:
        """See `Tier.forget`."""
        name = self._contract.name
        with contextlib.suppress(OSError, ConfigError):
            self._store.remove([StoredBlock(name, key, self._size, 0) for key in keys])

    def clear(self) -> None:
        """See `Tier.clear`."""
        self._store.remove(
            [one for one in self._store.blocks() if one.contract_name == self._contract.name]
        )

    def counts(self) -> Mapping[str, int]:
        """See `Tier.counts`.

        ``gone``, ``truncated``, ``corrupt``, ``foreign``, ``unreadable`` blocks were missed;
        ``full``, ``busy``, ``failed`` ones not stored; ``evicted`` ones were given up.
        """
        return self._counts.as_dict()

    def close(self) -> None:
        """See `Tier.close`."""
        self._store.close()

    # --- inside

    def _path(self, key: TierKey) -> str:
        return f"{self._folder}/{block_name(key)}"

    def _has(self, key: TierKey) -> bool:
        path = self._path(key)
        try:
            if os.lstat(path).st_size != self._size:  # cut off by a power failure, perhaps
                return False
        except OSError:
            return False
        if self._lru:
            self._store.touch(path)
        return True

    def _write_new(
        self, new: Sequence[tuple[TierKey, memoryview]]
    ) -> tuple[set[TierKey], list[TierKey]]:
        """Write what the store does not have; returns what it has now, and what it gave up."""
        try:
            begun = self._begin(len(new))
        except OSError as error:
            if error.errno not in _FULL:  # some file systems are full of files before of bytes
                raise
            self._counts.mishap("full", error)
            return set(), self._give_up(len(new))
        if begun is None:
            self._counts.mishap("busy", f"{len(new)} blocks are not written")
            return set(), []
        files, evicted = begun
        lost = self._ours(evicted)
        stored: set[TierKey] = set()
        unfilled, is_full = list(files), False
        for num_tried, (key, view) in enumerate(new):
            if num_tried == len(files):  # others are just writing all there is room for
                self._counts.add("busy", len(new) - num_tried)
                break
            parts = (header_of(self._contract, key, view), view)
            try:
                self._store.put(files[num_tried], block_name(key), parts)
            except OSError as error:
                is_full, is_busy = error.errno in _FULL, error.errno == errno.EAGAIN
                self._counts.mishap("full" if is_full else "busy" if is_busy else "failed", error)
                if is_full or is_busy:  # the next ones would wait as long
                    break
            else:
                stored.add(key)
                unfilled.remove(files[num_tried])
        lost = [key for key in lost if key not in stored]
        if unfilled:
            self._store.discard(unfilled, self._size)
        if is_full:
            gone = self._give_up(len(unfilled))
            stored.difference_update(gone)
            lost += gone
        return stored, lost

    def _give_up(self, num_files: int) -> list[TierKey]:
        """The device has less than the setting says: make room for the next ones."""
        left = max(0, self._store.num_files() - num_files)
        return self._ours(self._store.shrink(self.capacity_bytes, left) or [])

    def _ours(self, evicted: Sequence[StoredBlock]) -> list[TierKey]:
        """Count what was given up; returns the keys of this contract among it."""
        self._counts.add("evicted", len(evicted))
        return [block.key for block in evicted if block.contract_name == self._contract.name]

    def _begin(self, num_blocks: int) -> tuple[list[str], list[StoredBlock]] | None:
        bounds = (num_blocks, self._size, self.capacity_bytes, self._files_max)
        try:
            return self._store.begin(self._contract.name, *bounds)
        except FileNotFoundError:  # the folder, or all of the store, was removed while we run
            make_folder(self._store.place)
            self._store.add_contract(self._contract.name, self._contract.as_json())
            return self._store.begin(self._contract.name, *bounds)

    def _get(self, key: TierKey, view: memoryview, header: bytearray) -> bool:
        path = self._path(key)
        try:
            fd = os.open(path, READ_FLAGS)
            try:
                num_bytes = os.readv(fd, (header, view))
                if num_bytes != self._size:
                    num_bytes += _read_rest(fd, num_bytes, [memoryview(header), view])
                why = (
                    "truncated"
                    if num_bytes < self._size
                    else why_not(bytes(header), view, key, self._contract_name)
                )
                if self._lru and not why:
                    self._store.touch(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._counts.add("gone")
            return False
        except OSError as error:
            self._counts.mishap("unreadable", error)
            return False
        if why:
            self._counts.mishap(why, path)
            with contextlib.suppress(OSError):
                os.unlink(path)
        return not why


def _read_rest(fd: int, done: int, parts: list[memoryview]) -> int:
    """Go on after a read that was short; returns how many bytes more there were."""
    more = 0
    while True:
        while parts and done >= len(parts[0]):
            done -= len(parts.pop(0))
        if not parts:
            return more
        parts[0] = parts[0][done:]
        done = os.readv(fd, parts)
        if not done:
            return more
        more += done
