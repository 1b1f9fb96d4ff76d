"""GB/s from the pool into each tier and back, through the threads that a worker has for it."""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.tiers import plain
from benchmarks.tiers.nixl_files import NixlFiles
from benchmarks.transfer.figures import figure
from disagg.messages.registration import Contract
from disagg.scheduling.actions import TierKey
from disagg.workers.pool_region import PoolRegion
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.copies import TierCopies
from disagg.workers.tiers.kinds import open_tiers
from disagg.workers.tiers.stored_block import HEADER_BYTES, block_name

KIB, MIB = 1 << 10, 1 << 20
NUM_THREADS = 2
"""That read; half as many write. The peers have as many."""
TARGET = 0.8
GB = 1e9
FD_ROUND = 256
"""Files in one NIXL handle: a process may have 1,024 open."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved, and how often.

    Attributes:
        block_bytes: of each block.
        num_blocks: moved in one sample.
        rounds: samples of each side.
    """

    block_bytes: int
    num_blocks: int
    rounds: int

    @property
    def text(self) -> str:
        """For names and notes."""
        return f"{self.block_bytes // KIB} KiB"


class Bench:
    """A pool, the same bytes outside of it, one tier with its threads.

    Args:
        kind: of the tier.
        folder: for files, on the device that is measured.
        sizes: of blocks.
        loop: where ends are reported.
    """

    def __init__(
        self, kind: str, folder: Path, sizes: Sizes, loop: asyncio.AbstractEventLoop
    ) -> None:
        num_blocks, block_bytes = sizes.num_blocks, sizes.block_bytes
        drawn = np.random.default_rng(1)
        self.source = drawn.integers(0, 256, (num_blocks, block_bytes), np.uint8)
        self.pool = self.source.copy()
        self.order = random.Random(2).sample(range(num_blocks), num_blocks)
        self.keys: list[TierKey] = [(0, drawn.bytes(32)) for _ in range(num_blocks)]
        self.beside = folder
        self.folder = folder / "store"
        place = {"host": "", "disk": f":{self.folder}", "object": f":file://{self.folder}"}[kind]
        size = 2 * num_blocks * (block_bytes + HEADER_BYTES)
        contract = Contract(
            "benchmark", "uint8", ("bytes",), "plain", block_bytes, 16, "sha256", 1, 1
        )
        setting = f"{kind}{place}?size={size}&threads={NUM_THREADS}&slow_ms=60000"
        self._contract_name = TierContract.of(contract).name
        opened = open_tiers([setting], contract)
        self.tier = opened[0][1]
        region = PoolRegion(self.pool.ctypes.data, num_blocks, block_bytes, "DRAM", 0, self.pool)
        self._ended = asyncio.Event()
        self._result: Sequence[object] = ()
        self._loop = loop
        self.copies = TierCopies(opened, region, self._written, self._read, loop)

    def files(self) -> list[Path]:
        """Where the blocks are, of a tier that has files."""
        names = [block_name(key) for key in self.keys]
        return [self.folder / self._contract_name / name for name in names]

    def write_s(self) -> float:
        """Seconds to write every block; the tier has none of them before."""
        self.tier.forget(self.keys)
        return self._run(self.copies.submit_write, list(range(len(self.keys))))

    def read_s(self) -> float:
        """Seconds to read every block back, each to another place; checks the bytes."""
        self.pool[:] = 0
        seconds = self._run(self.copies.submit_read, self.order)
        self.check()
        return seconds

    def check(self) -> None:
        """Raise if the pool has not every block at its place."""
        if not all(self._result) or not np.array_equal(self.pool[self.order], self.source):
            raise AssertionError("blocks did not come back as they were")

    def reset(self) -> None:
        """Put every block where it is written from."""
        self.pool[:] = self.source

    def close(self) -> None:
        """End the tier."""
        if not self.copies.close(60):
            raise TimeoutError("a copy does not end")

    def _run(self, submit: Callable[..., None], order: Sequence[int]) -> float:
        async def run() -> float:
            self._ended.clear()
            begin_s = time.perf_counter()
            submit(0, self.tier.name, list(zip(self.keys, order, strict=True)))
            await self._ended.wait()
            return time.perf_counter() - begin_s

        return self._loop.run_until_complete(run())

    def _written(self, copy_id: int, stored: Sequence[TierKey], *rest: object) -> None:
        if len(stored) != len(self.keys):
            raise AssertionError(f"{len(stored)} of {len(self.keys)} blocks were stored: {rest}")
        self._ended.set()

    def _read(self, copy_id: int, intact: Sequence[bool]) -> None:
        self._result = intact
        self._ended.set()


def measure(folder: Path, sizes: Sizes) -> bool:
    """Print the figures of all tiers for one size of blocks; whether all targets were reached."""
    reached = _host(folder, sizes)
    reached &= _disk(folder, sizes)
    return _objects(folder, sizes) and reached


def _host(folder: Path, sizes: Sizes) -> bool:
    with _bench("host", folder, sizes) as bench:
        other = bench.source.copy()
        places = list(range(sizes.num_blocks))
        up = _alternate(
            sizes,
            bench.write_s,
            lambda: _timed(lambda: plain.copy(other, bench.pool, places, NUM_THREADS // 2)),
            before=bench.reset,
        )
        down = _alternate(
            sizes,
            bench.read_s,
            lambda: _timed(lambda: plain.copy(bench.pool, other, bench.order, NUM_THREADS)),
        )
    copied = "the same bytes copied by as many plain threads"
    reached = _print("host", "written", sizes, up, copied)
    return _print("host", "read", sizes, down, copied) and reached


def _disk(folder: Path, sizes: Sizes) -> bool:
    with _bench("disk", folder, sizes) as bench:

        def plain_write_s() -> float:
            order = list(range(sizes.num_blocks))
            with tempfile.TemporaryDirectory(dir=bench.beside) as place:
                return _timed(
                    lambda: plain.write_files(Path(place), bench.pool, order, NUM_THREADS // 2)
                )

        up = _alternate(sizes, bench.write_s, plain_write_s, before=bench.reset)
        files = bench.files()

        def plain_read_s() -> float:
            return _timed(
                lambda: plain.read_files(files, bench.pool, bench.order, NUM_THREADS, HEADER_BYTES)
            )

        down = _alternate(sizes, bench.read_s, plain_read_s)
        cold = _alternate(
            sizes, bench.read_s, plain_read_s, before=lambda: plain.drop_from_memory(files)
        )
        whole = bench.beside / "whole"
        whole.write_bytes(bench.source.tobytes())
        one_file = _alternate(
            sizes,
            bench.read_s,
            lambda: _timed(
                lambda: plain.read_one_file(whole, bench.pool, bench.order, NUM_THREADS)
            ),
        )
        through_nixl = _beside_nixl(bench, sizes)
    files_text = "as many plain threads, a file per block, without header, checksum, bound"
    reached = _print("disk", "written", sizes, up, files_text)
    reached &= _print("disk", "read from the page cache", sizes, down, files_text)
    reached &= _print("disk", "read from the device", sizes, cold, files_text)
    one = "as many plain threads from one large file"
    _print("disk", "read from the page cache, to one file", sizes, one_file, one, None)
    for what, found in through_nixl.items():
        _print("disk", f"{what}, to NIXL", sizes, found, "NIXL's plugin POSIX, same files", None)
    return reached


def _beside_nixl(bench: Bench, sizes: Sizes) -> dict[str, "Samples"]:
    nixl = NixlFiles(bench.pool)
    place = bench.beside / "nixl"
    place.mkdir()
    theirs = [place / str(i) for i in range(sizes.num_blocks)]
    straight = list(range(sizes.num_blocks))

    def move(direction: str, files: Sequence[Path], order: Sequence[int], offset: int) -> None:
        for first in range(0, len(files), FD_ROUND):
            part = slice(first, first + FD_ROUND)
            nixl.move(direction, files[part], order[part], offset)

    def write_s() -> float:
        for file in theirs:
            file.unlink(missing_ok=True)
        return _timed(lambda: move("WRITE", theirs, straight, 0))

    files = bench.files()

    def read_s() -> float:
        bench.pool[:] = 0
        spent_s = _timed(lambda: move("READ", files, bench.order, HEADER_BYTES))
        bench.check()
        return spent_s

    return {
        "written": _alternate(sizes, bench.write_s, write_s, before=bench.reset),
        "read from the page cache": _alternate(sizes, bench.read_s, read_s),
        "read from the device": _alternate(
            sizes, bench.read_s, read_s, before=lambda: plain.drop_from_memory(files)
        ),
    }


def _objects(folder: Path, sizes: Sizes) -> bool:
    """Over obstore's store in a directory: what the tier itself costs, without a network."""
    with _bench("object", folder, sizes) as bench:
        bench.reset()
        bench.write_s()
        files = bench.files()
        down = _alternate(
            sizes,
            bench.read_s,
            lambda: _timed(
                lambda: plain.read_files(files, bench.pool, bench.order, NUM_THREADS, HEADER_BYTES)
            ),
        )
        up = _alternate(sizes, bench.write_s, None, before=bench.reset)
    peer = "as many plain threads, the same files"
    _print("object (a directory)", "written", sizes, up, None, None)
    _print("object (a directory)", "read from the page cache", sizes, down, peer, None)
    return True


Samples = tuple[list[float], list[float] | None]


def _alternate(
    sizes: Sizes,
    ours: Callable[[], float],
    peer: Callable[[], float] | None,
    before: Callable[[], None] = lambda: None,
) -> Samples:
    """Seconds of both sides, in turn; the first round warms up."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(sizes.rounds + 1):
        for samples, side in zip(found, (ours, peer), strict=True):
            if side is None:
                continue
            before()
            seconds = side()
            if number:
                samples.append(seconds)
    return found[0], found[1] or None


def _print(
    tier: str,
    what: str,
    sizes: Sizes,
    found: Samples,
    peer_name: str | None,
    target: float | None = TARGET,
) -> bool:
    num_bytes = sizes.block_bytes * sizes.num_blocks
    ours, peer = ([num_bytes / GB / s for s in side] if side else None for side in found)
    assert ours is not None
    return figure(
        f"tiers/{tier}/{sizes.text}/{what}",
        ours,
        peer,
        unit="GB/s",
        target=target,
        peer_name=peer_name,
        note=f"{num_bytes // MIB} MiB in blocks of {sizes.text}, pool to tier or back through "
        f"TierCopies, {NUM_THREADS} threads read, {NUM_THREADS // 2} writes",
        higher_is_better=True,
    )


def _timed(work: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


@contextmanager
def _bench(kind: str, folder: Path, sizes: Sizes) -> Iterator[Bench]:
    """A tier in a folder of its own, removed with it."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{kind}-") as place:
        bench = Bench(kind, Path(place), sizes, loop)
        try:
            yield bench
        finally:
            bench.close()
            loop.close()
