"""The tier in an object store: an object per block."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from disagg.errors import ConfigError
from disagg.scheduling.actions import TierKey
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.counts import Counts
from disagg.workers.tiers.object_store import ObjectStore
from disagg.workers.tiers.options import PARAM, TierOptions
from disagg.workers.tiers.protocol import Written
from disagg.workers.tiers.stored_block import (
    CONTRACT_FILE,
    HEADER_BYTES,
    block_name,
    header_of,
    parse_block_name,
    why_not,
)

LOOK_SHARE = 16
"""After a sixteenth of the capacity has been written, what others wrote is listed again."""


class ObjectTier:
    """Blocks of one contract in an `ObjectStore`; implements `Tier`.

    Object stores count nothing for their users: each worker counts what it listed and wrote. Of
    ``n`` workers at one store each may exceed the capacity by a sixteenth before it looks again.
    When a block was last used is known to the worker that used it; for others, when it was
    written.

    Args:
        options: of the tier; ``place`` is the URL, which several workers may share. Where blocks
            lie in several ranks, each has a store of its own below it.
        contract: whose blocks.
        store: takes the place of the one at the URL.

    Raises:
        ConfigError: the store cannot be used, or cannot be listed.
    """

    def __init__(
        self, options: TierOptions, contract: TierContract, *, store: ObjectStore | None = None
    ) -> None:
        options.refuse_others()
        if "://" not in options.place:
            raise ConfigError(
                f"{PARAM}: an object tier needs a URL, such as object:s3://bucket/prefix",
                param=PARAM,
            )
        self.name = options.name
        self.capacity_bytes = options.capacity_bytes
        self._contract = contract
        self._size = HEADER_BYTES + contract.block_bytes
        if self._size > self.capacity_bytes:
            raise ConfigError(
                f"{PARAM}: {options.name} has no room for one block of {self._size} bytes",
                param=PARAM,
            )
        self._lru = options.eviction == "lru"
        self._store = store or ObjectStore(
            contract.place_in(options.place), timeout_ms=options.slow_ms
        )
        self._failures: tuple[type[Exception], ...] = (ConfigError, *self._store.failure)
        self._counts = Counts(options.name)
        self._mutex = threading.Lock()
        self._sizes: OrderedDict[tuple[str, str], int] = OrderedDict()  # the next to go first
        self._used_bytes = 0
        self._unlisted_bytes = 0
        self._look()
        try:
            self._store.put(contract.name, CONTRACT_FILE, contract.as_json().encode())
        except self._store.failure as error:
            raise self._store.failed(error) from error

    def known(self) -> Sequence[TierKey]:
        """See `Tier.known`."""
        with self._mutex:
            names = [name for folder, name in self._sizes if folder == self._contract.name]
        return [key for name in names if (key := parse_block_name(name)) is not None]

    def write(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> Written:
        """See `Tier.write`."""
        stored: dict[TierKey, None] = {}
        evicted: dict[TierKey, None] = {}
        folder = self._contract.name
        for key, view in blocks:
            name = block_name(key)
            try:
                if not self._has(name):
                    for gone in self._make_room():
                        stored.pop(gone, None)
                        evicted[gone] = None
                    header = header_of(self._contract, key, view)
                    self._store.put(folder, name, b"".join((header, view)))
                    self._add(name)
            except self._failures as error:
                self._counts.mishap("failed", error)
                break  # the next ones would wait as long
            stored[key] = None
            evicted.pop(key, None)
        return Written(tuple(stored), tuple(evicted))

    def read(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> tuple[bool, ...]:
        """See `Tier.read`."""
        intact: list[bool] = []
        try:
            for key, view in blocks:
                intact.append(self._get(key, view))
        except self._store.failure as error:  # the next ones would wait as long
            self._counts.mishap("unreadable", error)
        return (*intact, *[False] * (len(blocks) - len(intact)))

    def forget(self, keys: Sequence[TierKey]) -> None:
        """See `Tier.forget`."""
        names = [block_name(key) for key in keys]
        try:
            self._store.delete(self._contract.name, names)
        except self._store.failure as error:
            self._counts.mishap("failed", error)
        with self._mutex:
            for name in names:
                self._drop((self._contract.name, name))

    def clear(self) -> None:
        """See `Tier.clear`."""
        self._look()
        folder = self._contract.name
        with self._mutex:
            names = [name for of, name in self._sizes if of == folder]
        self._store.delete(folder, names)
        with self._mutex:
            for name in names:
                self._drop((folder, name))

    def counts(self) -> Mapping[str, int]:
        """See `Tier.counts`.

        ``gone``, ``truncated``, ``corrupt``, ``foreign``, ``unreadable`` blocks were missed,
        ``failed`` ones not stored; ``evicted`` ones were given up.
        """
        return self._counts.as_dict()

    def close(self) -> None:
        """See `Tier.close`."""
        self._store.close()

    # --- inside

    def _get(self, key: TierKey, view: memoryview) -> bool:
        name = block_name(key)
        data = self._store.get(self._contract.name, name, self._size)
        if data is None:
            self._counts.add("gone")
            with self._mutex:
                self._drop((self._contract.name, name))
            return False
        if len(data) != self._size:
            why = "truncated"
        else:
            header, block = bytes(data[:HEADER_BYTES]), data[HEADER_BYTES:]
            why = why_not(header, block, key, self._contract.name)
        if why:
            self._counts.mishap(why, name)
            self.forget([key])
            return False
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(block, np.uint8))
        self._has(name)
        return True

    def _has(self, name: str) -> bool:
        """Whether an object was seen or written; if so, it was used now."""
        with self._mutex:
            found = (self._contract.name, name) in self._sizes
            if found and self._lru:
                self._sizes.move_to_end((self._contract.name, name))
            return found

    def _add(self, name: str) -> None:
        with self._mutex:
            self._sizes[self._contract.name, name] = self._size
            self._used_bytes += self._size
            self._unlisted_bytes += self._size

    def _drop(self, of: tuple[str, str]) -> None:
        self._used_bytes -= self._sizes.pop(of, 0)

    def _make_room(self) -> list[TierKey]:
        """Give up what goes first until one block more fits; returns those of this contract."""
        if self._unlisted_bytes * LOOK_SHARE > self.capacity_bytes:
            self._look()
        out: list[tuple[tuple[str, str], int]] = []
        with self._mutex:
            while self._sizes and self._used_bytes + self._size > self.capacity_bytes:
                out.append(self._sizes.popitem(last=False))
                self._used_bytes -= out[-1][1]
        keys = [parse_block_name(name) for (of, name), _ in out if of == self._contract.name]
        self._delete(out)
        self._counts.add("evicted", len(out))
        return [key for key in keys if key is not None]

    def _delete(self, out: Sequence[tuple[tuple[str, str], int]]) -> None:
        """Delete objects that were taken off the count; those that cannot be are on it again."""
        for number, ((folder, name), _) in enumerate(out):
            try:
                self._store.delete(folder, [name])
            except self._store.failure:
                with self._mutex:
                    for of, size in reversed(out[number:]):
                        self._used_bytes += size - self._sizes.get(of, 0)
                        self._sizes[of] = size
                        self._sizes.move_to_end(of, last=False)
                raise

    def _look(self) -> None:
        """List the store; what was there before keeps its place in the order of use."""
        found = {
            (block.contract_name, block_name(block.key)): block.num_bytes
            for block in sorted(self._store.blocks(), key=lambda block: block.used_ns)
        }
        with self._mutex:
            before = OrderedDict((of, found.pop(of)) for of in self._sizes if of in found)
            self._sizes = OrderedDict(found)
            self._sizes.update(before)
            self._used_bytes = sum(self._sizes.values())
            self._unlisted_bytes = 0
