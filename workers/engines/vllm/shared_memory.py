"""Shared memory and sockets between the ranks of a worker, whose names go once each rank has them.

vLLM removes the names of memory when its processes end in order, and those of sockets never. Ray
ends a worker's process and the ranks with it, and nothing in them runs any more: each start of a
worker would leave what it had, on the CPU 4 MiB for each rank, and `/dev/shm` is memory.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, ShmRingBuffer

MAPPED = Path("/proc/self/maps")
FOLDER = Path("/dev/shm")
IPC = "ipc://"
SUMS = "-cpushm"
"""In the names of what vLLM's sums over ranks on the CPU go through."""


def drop_names() -> None:
    """Of the queues that this process has made, and of its sums; who has mapped one keeps it."""
    for found in gc.get_objects():
        # Not isinstance: proxies among them would answer for an object that is gone.
        if type(found) is ShmRingBuffer and found.is_creator:
            found.shared_memory.unlink()
            found.is_creator = False  # at its end it would do so again, and raise
        elif type(found) is MessageQueue and found._is_writer:
            for address in (found.handle.local_subscribe_addr, found.handle.local_notify_addr):
                if address is not None:  # None: all its readers are on other hosts
                    Path(address.removeprefix(IPC)).unlink(missing_ok=True)
    paths = {Path(line.split(maxsplit=5)[-1]) for line in MAPPED.read_text().splitlines()}
    for path in paths:
        if path.parent == FOLDER and SUMS in path.name and " (deleted)" not in path.name:
            path.unlink(missing_ok=True)  # each rank has mapped those of all


@contextmanager
def leaves_no_names() -> Iterator[None]:
    """In the process of a rank that may fail: the others end with it, whatever they had mapped."""
    try:
        yield
    except Exception:
        drop_names()
        raise
