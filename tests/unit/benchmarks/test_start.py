"""The benchmark of starts: it reads what the kernel says, and its lines follow from that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.start.__main__ import machine_lines, router_lines
from benchmarks.start.process_figures import Taken, in_sum, taken_by
from benchmarks.start.systems import start_router
from tests.checkpoints import make_checkpoint

HOLDS = (
    "import sys; held = b'x' * (64 << 20); sys.stdout.write('held'); sys.stdout.flush(); input()"
)


def test_a_process_is_read_as_it_is() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == b"held"
    taken = taken_by(process.pid)
    process.communicate(b"\n")
    assert 64 <= taken.pss_mib <= taken.rss_mib < 200
    assert 0 <= taken.cpu_s < taken.start_s * (os.cpu_count() or 1) + 0.1
    with pytest.raises(OSError, match=str(process.pid)):
        taken_by(process.pid)


def test_sums_and_lines() -> None:
    one, two = Taken(1.0, 0.5, 100.0, 80.0), Taken(3.0, 1.5, 200.0, 120.0)
    assert in_sum([one, two]) == Taken(3.0, 2.0, 300.0, 200.0)
    lines = router_lines({"ours": [one], "with torch": [two]})
    assert [(line["ratio"], line["ok"]) for line in lines] == [
        (3.0, True),
        (3.0, None),
        (2.0, True),
        (1.5, None),
    ]
    # Negative control: too slow and too large is said so.
    lines = router_lines({"ours": [two, Taken(5.0, 1.0, 151.0, 1.0)], "with torch": [one, one]})
    assert [line["ok"] for line in lines] == [False, None, False, None]
    (line, *_) = machine_lines([{"prefill-0": one}, {"prefill-0": two}])
    assert (line["name"], line["ours"], line["spread"]) == (
        "start/machine, prefill-0",
        2.0,
        [[1.0, 3.0]],
    )


def test_the_peer_is_a_router_with_torch(tmp_path: Path) -> None:
    """What is compared differs in that; no figure is asserted but that torch's size shows."""
    checkpoint = make_checkpoint(tmp_path / "tiny", "qwen3", num_layers=1)
    ours, peer = (start_router(way, checkpoint, tmp_path) for way in ("ours", "with torch"))
    assert peer.rss_mib > ours.rss_mib + 50
