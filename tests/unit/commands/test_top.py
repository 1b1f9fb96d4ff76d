"""`disagg top`: screens, rates, and a router that goes away."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from disagg.commands import top
from disagg.errors import RemoteFault

ROOT = Path(__file__).parents[3]


def request(name: str, num_tokens: int, **changed: Any) -> dict[str, Any]:
    return {
        "request_id": name,
        "tenant": "",
        "state": "decode",
        "received_ms": 1_000,
        "first_token_ms": 1_250,
        "finished_ms": None,
        "num_prompt_tokens": 9,
        "num_tokens": num_tokens,
        "prefill": "p0",
        "decode": "d0",
    } | changed


def body(now_ms: int, *requests: dict[str, Any]) -> dict[str, Any]:
    router = {
        "router_id": "r-1",
        "version": "0.1.0",
        "model": "tiny",
        "status": "ok",
        "ready": True,
        "missing": [],
        "num_requests": 1,
        "num_waiting": 0,
    }
    return {
        "now_ms": now_ms,
        "router": router,
        "revisions": [],
        "workers": [],
        "requests": list(requests),
    }


def worker(name: str) -> dict[str, Any]:
    group = {"kind": "sliding_window", "window_tokens": 1024, "num_held": 70_000, "num_cached": 9}
    return {
        "worker_id": name,
        "role": "prefill",
        "state": "stalled",
        "answered": True,
        "epoch": "0123456789abcdef",
        "revision": "default",
        "version": "0.1.0",
        "wire": [1, 1],
        "address": "192.0.2.100:7100",
        "num_running": 64,
        "num_waiting": 16,
        "num_prefill_tokens_queued": 16_384,
        "num_reservations": 8,
        "heard_ms_ago": 1_000,
        "pool": {
            "num_blocks_free": 29_999,
            "num_blocks_usable": 99_999,
            "num_blocks_quarantined": 0,
            "groups": [group | {"group": 0}, group | {"group": 1}],
        },
        "leases": [],
        "inbound": [],
    }


def text(screen: RenderableType, columns: int = 160) -> str:
    console = Console(file=io.StringIO(), width=columns, record=True)
    console.print(screen)
    return console.export_text()


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = body(2_000, request("a", 10), request("b", 4, finished_ms=1_900))
    now = body(4_000, request("new", 7), request("a", 30), request("b", 4, finished_ms=1_900))
    shown = {
        line.split()[0]: line.split()
        for line in text(top.draw_screen(now, before)).split("\n")
        if line
    }
    assert shown["a"][1:] == ["decode", "p0", "→", "d0", "9", "30", "10.0", "250", "ms", "3.0", "s"]
    assert "10.0" not in shown["new"]
    assert top.rate_of(before["requests"][1], 4_000, before) == ""
    again = request("a", 2, received_ms=3_000)  # sent again under its id: another request
    assert top.rate_of(again, 4_000, before) == ""


def test_80_columns_show_every_worker_and_its_queues_whole() -> None:
    """A screen folds no lines: what it has no room for is left out, not cut off."""
    look = body(1_000, request("a", 10)) | {"workers": [worker("prefill-10")]}
    shown, wide = text(top.draw_screen(look, None), 80), text(top.draw_screen(look, None))
    for part in ("prefill-10", "stalled", "16384", "70000", "29999", "99999"):
        assert part in shown
        assert part in wide
    assert "\u2026" not in shown
    assert "192.0.2.100:7100" in wide


def test_a_router_that_goes_away_is_shown_and_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: Iterator[dict[str, Any] | RemoteFault] = iter(
        [body(1_000), RemoteFault("no router answers"), body(2_000, request("back", 1))]
    )

    def fetch(*_: Any) -> dict[str, Any]:
        look = next(looks)
        if not isinstance(look, dict):
            raise look
        return look

    monkeypatch.setattr(top, "fetch", fetch)
    monkeypatch.setattr("disagg.commands.top.time.sleep", lambda _: None)
    screens = top.watch("http://127.0.0.1:1", 1, 1)
    assert "no requests yet" in text(next(screens))
    away = text(next(screens))
    assert "no router answers" in away
    assert "r-1" in away  # what was seen last
    assert "back" in text(next(screens))


def test_the_first_look_has_to_succeed() -> None:
    with pytest.raises(RemoteFault, match="no router answers"):
        next(top.watch("http://127.0.0.1:1", 1, 1))


def test_without_a_terminal_it_says_what_programs_use(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DISAGG_")}
    run = subprocess.run(
        [sys.executable, "-m", "disagg.commands", "top"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 2
    assert "disagg status --json" in run.stderr
