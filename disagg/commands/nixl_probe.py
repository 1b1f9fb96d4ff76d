"""A process that has NIXL read from its own memory once, and says over what; it may crash."""

import os
import sys
from importlib.metadata import version

import numpy as np

from disagg.errors import RemoteFault
from disagg.workers.nixl_agent import NixlAgent
from disagg.workers.pool_region import PoolRegion

BLOCK_BYTES = 4096


def main() -> int:
    """Read one block; returns the exit code."""
    memory = np.zeros(2 * BLOCK_BYTES, dtype=np.uint8)
    pool = PoolRegion(memory.ctypes.data, 2, BLOCK_BYTES, "DRAM", 0, memory)
    try:
        NixlAgent(f"doctor-{os.getpid()}", pool).check()
    except RemoteFault as error:
        print(error.message, file=sys.stderr)
        return 1
    print(f"{version('nixl')}: a READ by UCX ended well")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # NIXL's own end takes its time
