"""Bytes of bookkeeping per block of a full pool, in a process of its own."""

import gc
import os
import sys
from pathlib import Path

from benchmarks.coordinator.cases import BLOCK, coordinator
from disagg.kv.sequence import KVSequence

PROMPT_BLOCKS = 8192


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Fill the pool prompt by prompt, free all, and print what one block costs."""
    num_blocks = int(sys.argv[1])
    gc.collect()
    before = resident_bytes()
    kv = coordinator([0], num_blocks + 1, num_blocks * BLOCK)
    left, number = num_blocks, 0
    while left:
        size = min(PROMPT_BLOCKS, left)
        hashes = [os.urandom(32) for _ in range(size)]
        made = KVSequence(number, [0] * (size * BLOCK), hashes)
        assert kv.allocate(made, num_new_tokens=size * BLOCK)
        kv.publish(number, size * BLOCK)
        kv.free(number)
        left, number = left - size, number + 1
    del made, hashes
    gc.collect()
    assert kv.num_free_blocks == num_blocks
    assert len(kv.pool.cache.index(0)) == num_blocks
    print((resident_bytes() - before) / num_blocks)


if __name__ == "__main__":
    main()
