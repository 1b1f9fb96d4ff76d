"""`disagg drain --wait`: when a worker counts as free, and a router that is away meanwhile."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.commands import drain
from disagg.errors import RemoteFault

WORKER = {"worker_id": "w", "epoch": "e"}


def view(**stats: int) -> dict[str, Any]:
    known = dict.fromkeys(drain._GOES_ON, 0) | {"draining": True} | stats
    return {"info": {"incarnation": WORKER}, "stats": known, "num_live": 0}


def waits(
    monkeypatch: pytest.MonkeyPatch, *looks: Any, ends: bool = False, bound_s: float = 60.0
) -> tuple[bool, int]:
    """Whether the worker was free in the end, and after how many looks; the last one goes on."""
    clock = itertools.count(step=drain.GONE_S / 2)
    all_looks: Iterator[Any] = itertools.chain(looks, itertools.repeat(looks[-1]))
    num_looks = 0

    def call(*_: Any, **__: Any) -> dict[str, Any]:
        nonlocal num_looks
        num_looks += 1
        if isinstance(look := next(all_looks), Exception):
            raise look
        return {"workers": look}

    monkeypatch.setattr(drain, "call_router", call)
    time = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(drain, "time", time)
    return drain._wait("http://r", {"workers": [WORKER], "ends": ends}, bound_s), num_looks


def test_one_that_stays_is_free_once_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch, [view(num_running=1)], [view()]) == (True, 2)


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_the_router_misses_for_a_moment_is_not_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    """Its session broke, or the router is a new one: it may still serve others."""
    looks: tuple[Any, ...] = ([view(num_running=1)], [], [view(num_running=1)], [], [])
    assert waits(monkeypatch, *looks, ends=ends)[0]
    said = capsys.readouterr().out.splitlines()
    assert said == ["w: 1 running", "w: is away", "w: 1 running", "w: is away", "w: done"]


def test_a_router_that_is_away_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = RemoteFault("no router answers")
    assert waits(monkeypatch, [view(num_running=1)], away, away, [view()]) == (True, 4)
    assert capsys.readouterr().out.count("w: no router answers") == 1
    assert waits(monkeypatch, away)[0] is False, "until the deadline is over"
    assert "not free after 60 s: w" in capsys.readouterr().out


def test_the_next_life_of_a_worker_says_that_this_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    next_life = view(num_running=1) | {"info": {"incarnation": WORKER | {"epoch": "f"}}}
    assert waits(monkeypatch, [view(num_running=1)], [next_life], ends=True) == (True, 2)


def test_a_router_that_comes_back_has_to_find_the_worker_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the one before it had missed says nothing of what the next one has not heard yet."""
    running, away = [view(num_running=1)], RemoteFault("no router answers")
    looks: tuple[Any, ...] = (running, [], away, [], running, [view()])
    assert waits(monkeypatch, *looks, bound_s=600.0)[0]
    said = capsys.readouterr().out.splitlines()
    assert said.count("w: done") == 1
    assert said[-2:] == ["w: 1 running", "w: done"]
