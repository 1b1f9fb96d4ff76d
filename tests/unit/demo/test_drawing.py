"""What the demo says a transfer saved: by windows, and by the prefix cache."""

import io
from typing import Any

import pytest
from rich.console import Console

from demo.asking import Answer
from demo.drawing import draw, summary, uncached_bytes
from demo.prompts import demo_prompts

BLOCK_BYTES = 4096


def group(kind: str, block_map: str) -> dict[str, Any]:
    return {
        "group": int(kind == "full_attention"),
        "kind": kind,
        "window_tokens": 0 if kind == "full_attention" else 16,
        "block_tokens": 8,
        "block_map": block_map,
        "pulled_blocks": block_map.count("p"),
        "pulled_bytes": block_map.count("p") * BLOCK_BYTES,
        "useful_bytes": block_map.count("p") * BLOCK_BYTES,
        "full_blocks": len(block_map),
        "full_bytes": len(block_map) * BLOCK_BYTES,
    }


FIRST = [group("sliding_window", ".......ppp"), group("full_attention", "pppppppppp")]
SECOND = [group("sliding_window", ".......ppp"), group("full_attention", "hhhhhhpppp")]


@pytest.mark.parametrize(("groups", "blocks"), [(FIRST, [10, 10]), (SECOND, [4, 4])])
def test_what_is_cached_is_moved_by_nobody(groups: list[dict[str, Any]], blocks: list[int]) -> None:
    assert [count for _, count in uncached_bytes(groups)] == [n * BLOCK_BYTES for n in blocks]


def test_both_savings_are_drawn_apart() -> None:
    def answer(groups: list[dict[str, Any]]) -> Answer:
        transfer = {"groups": groups, "read_ms": 1, "exposed_ms": 1}
        worker = {"worker_id": "w"}
        plan = {"prefill": worker, "decode": worker, "computed_tokens": 1, "hit_tokens": 0}
        record = {"generations": [plan | {"pull": None, "transfer": transfer}]}
        return Answer(demo_prompts(0)[0], "x", 80, 1, 1.0, 1.0, record)

    out = io.StringIO()
    console = Console(file=out, width=120, color_system=None)
    summary(console, [answer(FIRST), answer(SECOND)], 2, 2)
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in out.getvalue().splitlines()
        if len(cells := line.strip("│").split("│")) == 6
    }
    assert rows["sliding window"] == ["24.0 KiB", "56.0 KiB", "57 %", "80.0 KiB", "30 %"]
    assert rows["full attention"] == ["56.0 KiB", "56.0 KiB", "0 %", "80.0 KiB", "30 %"]
    assert rows["all groups"] == ["80.0 KiB", "112.0 KiB", "29 %", "160.0 KiB", "30 %"]

    out.truncate(0)
    console.print(draw(answer(SECOND), "x"))
    assert "pulled 28.0 KiB; every block not cached: 32.0 KiB (cached: 48.0 KiB)" in out.getvalue()
