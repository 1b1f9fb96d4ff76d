"""The tier in this host's memory: one buffer, as large as it will ever be."""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from disagg.errors import ConfigError
from disagg.scheduling.actions import TierKey
from disagg.workers import machine
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.counts import Counts
from disagg.workers.tiers.options import PARAM, TierOptions
from disagg.workers.tiers.protocol import Written


class HostTier:
    """Blocks in slots of one buffer; implements `Tier`.

    All of the memory is taken at the start. Copies go on outside of the lock: a slot that is being
    read, or filled, is pinned, and is given to nobody else. There is no checksum: it is memory of
    the same process as the pool's.

    Args:
        options: of the tier; ``capacity_bytes`` is rounded down to whole blocks.
        contract: whose blocks.
        available_bytes: what the machine can give; None asks it.

    Raises:
        ConfigError: there is not so much memory, or it holds no block.
    """

    def __init__(
        self, options: TierOptions, contract: TierContract, *, available_bytes: int | None = None
    ) -> None:
        options.refuse_others()
        if options.place:
            raise ConfigError(
                f"{PARAM}: a host tier has no place, not {options.place!r}", param=PARAM
            )
        block_bytes = contract.block_bytes
        num_slots = options.capacity_bytes // block_bytes
        if available_bytes is None:
            available_bytes = machine.device_memory("cpu").available_bytes
        if not num_slots or num_slots * block_bytes > available_bytes:
            raise ConfigError(
                f"{PARAM}: {options.name}: size={options.capacity_bytes} bytes; a block takes "
                f"{block_bytes}, and this machine can give {available_bytes}",
                param=PARAM,
            )
        self.name = options.name
        self.capacity_bytes = num_slots * block_bytes
        self._lru = options.eviction == "lru"
        memory = np.frombuffer(_take(self.capacity_bytes), np.uint8)
        self._slots = memory.reshape(num_slots, block_bytes)
        self._mutex = threading.Lock()
        self._slot_of: OrderedDict[TierKey, int] = OrderedDict()  # the next to go first
        self._free = list(range(num_slots))
        self._pins = [0] * num_slots
        self._dropped: set[int] = set()  # no block's any more, but pinned
        self._counts = Counts(options.name)

    def known(self) -> Sequence[TierKey]:
        """See `Tier.known`: a new process has none."""
        with self._mutex:
            return tuple(self._slot_of)

    def write(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> Written:
        """See `Tier.write`."""
        stored: dict[TierKey, None] = {}
        evicted: dict[TierKey, None] = {}
        for key, view in blocks:
            with self._mutex:
                if key in self._slot_of:
                    self._used(key)
                    stored[key] = None
                    continue
                slot = self._free.pop() if self._free else self._give_up(evicted)
            if slot is None:
                self._counts.mishap("busy", "every slot is being copied")
                continue
            try:
                np.copyto(self._slots[slot], np.frombuffer(view, np.uint8))
            except BaseException:
                with self._mutex:
                    self._free.append(slot)
                raise
            with self._mutex:
                if key in self._slot_of:  # another thread was faster
                    self._free.append(slot)
                else:
                    self._slot_of[key] = slot
            stored[key] = None
            evicted.pop(key, None)
        self._counts.add("evicted", len(evicted))
        return Written(tuple(key for key in stored if key not in evicted), tuple(evicted))

    def read(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> tuple[bool, ...]:
        """See `Tier.read`."""
        return tuple(self._copy_out(key, view) for key, view in blocks)

    def forget(self, keys: Sequence[TierKey]) -> None:
        """See `Tier.forget`."""
        with self._mutex:
            for key in keys:
                if (slot := self._slot_of.pop(key, None)) is not None:
                    self._dropped.add(slot)
                    self._settle(slot)

    def clear(self) -> None:
        """See `Tier.clear`."""
        self.forget(self.known())

    def counts(self) -> Mapping[str, int]:
        """See `Tier.counts`: ``gone`` blocks were missed, ``busy`` ones not stored."""
        return self._counts.as_dict()

    def close(self) -> None:
        """See `Tier.close`: the memory goes with the last view of it."""
        with self._mutex:
            self._slot_of.clear()
            self._free.clear()

    # --- inside; all but copies under the lock

    def _copy_out(self, key: TierKey, view: memoryview) -> bool:
        with self._mutex:
            slot = self._slot_of.get(key)
            if slot is not None:
                self._used(key)
                self._pins[slot] += 1
        if slot is None:
            self._counts.add("gone")
            return False
        try:
            np.copyto(np.frombuffer(view, np.uint8), self._slots[slot])
        finally:
            with self._mutex:
                self._pins[slot] -= 1
                self._settle(slot)
        return True

    def _used(self, key: TierKey) -> None:
        if self._lru:
            self._slot_of.move_to_end(key)

    def _give_up(self, evicted: dict[TierKey, None]) -> int | None:
        """The slot of the block that goes first, among those that nobody copies."""
        for key, slot in self._slot_of.items():
            if not self._pins[slot]:
                del self._slot_of[key]
                evicted[key] = None
                return slot
        return None

    def _settle(self, slot: int) -> None:
        if slot in self._dropped and not self._pins[slot]:
            self._dropped.remove(slot)
            self._free.append(slot)


def _take(num_bytes: int) -> mmap.mmap:
    """Memory that is there from now on: nothing fails for want of it in the middle of the work."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
    return memory
