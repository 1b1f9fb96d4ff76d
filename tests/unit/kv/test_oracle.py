"""Every number that the peer answered in the golden traces (tests/data/oracle)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.oracle_adapter import Coordinator

TRACES = sorted((Path(__file__).parents[2] / "data" / "oracle").glob("*.json"))
MASK = (1 << 64) - 1


def token(stream: int, place: int) -> int:
    x = (((stream & 0xFFFFFFFF) << 32 | place) + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % 50000


def replay(doc: dict[str, Any], kv: Coordinator) -> tuple[int, list[tuple[Any, ...]]]:
    """Number of checks and the mismatches (op number, op, field, expected, got)."""
    outputs: dict[str, tuple[int, int]] = {}
    checks, bad = 0, []
    for number, op in enumerate(doc["ops"]):
        kind, key = op["op"], op["req"]
        got: dict[str, Any] = {}
        if kind == "add":
            kv.add(key, [token(s, j) for s, n in op["prompt"] for j in range(n)])
            outputs[key] = (op["out"], 0)
        elif kind == "lookup":
            got["hit_tokens"], got["hit_blocks"] = kv.lookup(key)
        elif kind == "alloc":
            ext, delay, gate = (op.get(name, 0) for name in ("ext", "delay", "gate"))
            got["ok"] = kv.alloc(key, op["new"], op.get("hit"), ext, bool(delay), bool(gate))
            got["held"], got["free"] = kv.held(key), kv.free_blocks()
        elif kind == "commit":
            kv.commit(key, op["computed"])
            got["held"] = kv.held(key)
        elif kind == "append":
            stream, done = outputs[key]
            kv.append(key, [token(stream, done + j) for j in range(op["n"])])
            outputs[key] = (stream, done + op["n"])
        else:
            kv.free(key)
            got["free"] = kv.free_blocks()
        if kind in ("alloc", "free") and kv.kv.num_usable_blocks < 1000:  # roomy ones at the end
            kv.kv.check()
        for name, value in op.get("expect", {}).items():
            checks += 1
            if got[name] != value:
                bad.append((number, kind, name, value, got[name]))
    return checks, bad


def doc_of(name: str) -> dict[str, Any]:
    path = next(path for path in TRACES if path.stem == name)
    doc: dict[str, Any] = json.loads(path.read_text())
    return doc


def test_all_traces_are_here() -> None:
    assert len(TRACES) == 36
    assert [token(1, j) for j in range(4)] == [56, 13167, 40514, 40283]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    doc = json.loads(path.read_text())
    adapter = Coordinator(doc["config"])
    checks, bad = replay(doc, adapter)
    adapter.kv.check()
    assert checks > 400
    assert not bad, f"{len(bad)} mismatches, first {bad[0]}"


def test_a_window_one_block_wider_is_noticed() -> None:
    doc = doc_of("gemma_1_5-roomy-s1")
    config = json.loads(json.dumps(doc["config"]))
    for group in config["groups"][1:]:
        group["window"] += 16
    assert replay(doc, Coordinator(config))[1]


def test_another_eviction_order_is_noticed() -> None:
    doc = doc_of("gemma_1_5-starved-s1")
    kv = Coordinator(doc["config"])
    release = kv.kv.pool.release

    def reversed_release(block_ids: list[int], *, evict_first: bool = False) -> int:
        return release(list(reversed(block_ids)), evict_first=evict_first)

    kv.kv.pool.release = reversed_release  # type: ignore[method-assign]
    assert replay(doc, kv)[1]


def test_allocating_before_all_hits_are_touched_is_noticed() -> None:
    """Break the order on purpose: group 0 grows before the last group adopts its hit."""
    doc = doc_of("gemma_1_5-tight-s1")
    kv = Coordinator(doc["config"])
    first, last = kv.kv.managers[0], kv.kv.managers[-1]
    adopt = last.adopt

    def late(key: Any, hit: Any, position: int) -> None:
        first.grow(key, position + 1)
        adopt(key, hit, position)

    last.adopt = late  # type: ignore[method-assign]
    with pytest.raises(AssertionError):  # an InvariantViolation, or the mismatch below
        assert not replay(doc, kv)[1]
