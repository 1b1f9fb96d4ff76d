"""What tiers are compared with: the same bytes, copied, read and written by plain threads."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]
"""Shape [num_blocks, block_bytes]."""


def in_threads(num_threads: int, numbers: Sequence[int], work: Callable[[int], None]) -> None:
    """Do work for each number, in equal parts on so many threads; raises what one raised."""
    failed: list[BaseException] = []

    def part(first: int) -> None:
        try:
            for number in numbers[first::num_threads]:
                work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=part, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def copy(to: Blocks, source: Blocks, order: Sequence[int], num_threads: int) -> None:
    """Copy blocks, each to its place in ``order``, within this process."""

    def one(number: int) -> None:
        np.copyto(to[order[number]], source[number])

    in_threads(num_threads, range(len(order)), one)


def write_files(folder: Path, pool: Blocks, order: Sequence[int], num_threads: int) -> None:
    """Write a file per block: no other name first, no header, no checksum, no bound."""

    def one(number: int) -> None:
        fd = os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, pool[order[number]])
        finally:
            os.close(fd)

    in_threads(num_threads, range(len(order)), one)


def read_files(
    files: Sequence[Path], pool: Blocks, order: Sequence[int], num_threads: int, header_bytes: int
) -> None:
    """Read the blocks in files into the pool, without looking at what was read."""

    def one(number: int) -> None:
        fd = os.open(files[number], os.O_RDONLY)
        try:
            os.preadv(fd, [pool[order[number]]], header_bytes)
        finally:
            os.close(fd)

    in_threads(num_threads, range(len(order)), one)


def read_one_file(file: Path, pool: Blocks, order: Sequence[int], num_threads: int) -> None:
    """Read the blocks of one large file, each to its place."""
    fd = os.open(file, os.O_RDONLY)
    block_bytes = pool.shape[1]

    def one(number: int) -> None:
        os.preadv(fd, [pool[order[number]]], number * block_bytes)

    try:
        in_threads(num_threads, range(len(order)), one)
    finally:
        os.close(fd)


def drop_from_memory(files: Sequence[Path]) -> None:
    """Make the next read of files come from their device."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
