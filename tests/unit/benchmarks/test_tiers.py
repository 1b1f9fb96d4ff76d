"""The benchmark of tiers: both sides move the same bytes, and a wrong one is seen."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tiers import plain, rates, steps
from benchmarks.tiers.nixl_files import NixlFiles
from tests.unit.workers.tiers.pools import Pool

SIZES = rates.Sizes(block_bytes=4096, num_blocks=8, rounds=1)


def test_a_line_per_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates.measure(tmp_path, SIZES)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [line["name"] for line in lines]
    assert len(set(names)) == len(names) == 11
    with_target = [line["name"] for line in lines if line["target"] == 0.8]
    assert with_target == [
        "tiers/host/4 KiB/written",
        "tiers/host/4 KiB/read",
        "tiers/disk/4 KiB/written",
        "tiers/disk/4 KiB/read from the page cache",
        "tiers/disk/4 KiB/read from the device",
    ]
    assert all(line["ours"] > 0 for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_the_peers_move_the_same_bytes(tmp_path: Path) -> None:
    source = np.random.default_rng(1).integers(0, 256, (8, 4096), np.uint8)
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    other = np.zeros_like(source)
    plain.copy(other, source, order, 2)
    assert np.array_equal(other[order], source)
    plain.write_files(tmp_path, source, order, 2)
    files = [tmp_path / str(number) for number in range(8)]
    assert [file.read_bytes() for file in files] == [source[i].tobytes() for i in order]
    back = np.zeros_like(source)
    plain.drop_from_memory(files)
    plain.read_files(files, back, order, 2, 0)
    assert np.array_equal(back, source)


def test_nixl_moves_the_same_bytes(tmp_path: Path) -> None:
    pool = np.random.default_rng(1).integers(0, 256, (8, 4096), np.uint8)
    source, order = pool.copy(), [3, 1, 7, 0, 5, 2, 6, 4]
    files = [tmp_path / str(number) for number in range(8)]
    nixl = NixlFiles(pool)
    nixl.move("WRITE", files, list(range(8)), 100)
    assert [file.read_bytes()[100:] for file in files] == [block.tobytes() for block in source]
    pool[:] = 0
    nixl.move("READ", files, order, 100)
    assert np.array_equal(pool[order], source)


def test_a_wrong_byte_is_seen(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    bench = rates.Bench("host", tmp_path, SIZES, loop)
    bench.write_s()
    bench.read_s()
    bench.source[3, 5] ^= 1
    with pytest.raises(AssertionError, match="did not come back"):
        bench.read_s()
    bench.close()
    loop.close()


def test_a_peer_that_fails_is_seen() -> None:
    def fail(number: int) -> None:
        raise OSError(number)

    with pytest.raises(OSError, match="0"):
        plain.in_threads(2, range(1), fail)


def test_the_writer_writes_until_it_is_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "TIER_BYTES", 1 << 20)
    monkeypatch.setattr(steps, "WRITE_EVERY_S", 0.0)
    writer = steps.Writer("host", Pool(8).region, 8)
    asked: list[int] = []

    class Stop:
        def is_set(self) -> bool:
            asked.append(writer.num_bytes)
            return len(asked) > 3

    writer.run(Stop())  # type: ignore[arg-type]
    writer.close()
    assert asked == [0, 8 * 512, 16 * 512, 24 * 512]
