"""Figures of the transfer benchmarks: their lines, and that a miss is a miss."""

import json
from typing import Any

import pytest

from benchmarks.transfer.cost import Bench, measure_tables
from benchmarks.transfer.figures import figure

KEYS = ["name", "ours", "peer", "unit", "ratio", "target", "ok", "peer_name", "note"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_ratio_above_one_beats_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    about: dict[str, Any] = {"unit": "ms", "peer_name": "other", "note": "of nothing"}
    assert figure("as fast", [2.0, 1.0, 3.0], [1.8], target=0.9, **about)
    assert not figure("slower", [2.0], [1.7], target=0.9, **about)
    assert figure("no target", [2.0], [1.0], target=None, **about)
    assert figure("no peer", [2.0], None, target=None, **about)
    fast, slower, no_target, no_peer = lines(capsys)
    assert [list(line) for line in (fast, slower, no_target, no_peer)] == [KEYS] * 4
    assert (fast["ours"], fast["peer"], fast["ratio"], fast["ok"]) == (2.0, 1.8, 0.9, True)
    assert (slower["ratio"], slower["ok"]) == (0.85, False)
    assert (no_target["ratio"], no_target["ok"]) == (0.5, None)
    assert (no_peer["peer"], no_peer["ratio"], no_peer["ok"]) == (None, None, None)


def test_the_tables_are_measured_for_every_pool(capsys: pytest.CaptureFixture[str]) -> None:
    measure_tables([3_000, 6_000], 1)
    found = lines(capsys)
    assert len(found) == 8  # owner and reader, adjacent and scattered, two pools
    assert len({line["name"] for line in found}) == 8
    assert all(line["ours"] > 0 for line in found)
    assert [line["target"] for line in found] == [None, 0.67] * 4


def test_a_pull_must_end_in_a_commit() -> None:
    bench = Bench(3_000, scattered=True)
    assert min(bench.pull(1)) > 0
    bench.leases.on_commit = lambda sender, commit: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not enough values"):
        bench.pull(2)
