"""A worker that has served and does not answer any more is taken for hung, and ended."""

import pickle
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray

from disagg.cluster import supervised
from disagg.cluster.supervised import Supervised
from disagg.cluster.worker_actors import ActorName
from disagg.workers import actor
from disagg.workers.actor import WorkerState

PATIENCE_S = 300.0


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    actors: list[Any] = []
    monkeypatch.setattr(supervised, "end_actor", lambda name, actor: actors.append(actor))
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    return actors


@pytest.fixture
def worker(said: list[str], ended: list[Any]) -> Supervised:
    worker = Supervised(ActorName("decode-0", "1"), "decode", said.append)
    worker.actor = "first life"
    return worker


def answer(worker: Supervised, unregistered: str = "") -> None:
    worker.asked = WorkerState(
        "decode-0", "decode", "e", "a:1", "host", 1, "", "", unregistered=unregistered
    )
    worker.hear()


def look(worker: Supervised, from_s: int, to_s: int) -> None:
    for now_s in range(from_s, to_s):
        worker.see_silence(float(now_s), PATIENCE_S)


def test_one_that_hangs_is_ended_and_starts_anew(
    worker: Supervised, said: list[str], ended: list[Any]
) -> None:
    answer(worker)
    said.clear()
    look(worker, 0, 29)
    assert worker.serves
    look(worker, 29, 32)
    assert not worker.serves
    assert said == ["worker decode-0: it has not answered for 30 s"]
    look(worker, 32, 299)
    assert ended == []
    look(worker, 299, 302)
    assert ended == ["first life"]
    assert worker.actor is None
    assert worker.fault == "", "it has served: its settings are no reason"
    assert said[1:] == ["worker decode-0: it has not answered for 300 s; a new one in 0 s"]


def test_an_answer_begins_the_time_anew(worker: Supervised, ended: list[Any]) -> None:
    answer(worker)
    look(worker, 0, 200)
    answer(worker)
    assert worker.serves
    look(worker, 200, 400)
    assert ended == []


def test_one_that_starts_may_take_its_time(worker: Supervised, ended: list[Any]) -> None:
    look(worker, 0, 1_000)
    answer(worker)
    worker.actor = "second life"
    look(worker, 1_000, 2_000)
    assert ended == []


def test_a_supervisor_that_stood_still_blames_nobody(worker: Supervised, ended: list[Any]) -> None:
    answer(worker)
    look(worker, 0, 2)
    look(worker, 10_000, 10_002)
    assert worker.serves
    assert ended == []


def test_one_that_no_router_takes_is_named_with_the_reason(
    worker: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    answer(worker, "router a:1: not registered")
    now_s += 4
    answer(worker, "router a:1: not registered")
    assert worker.said == "", "it may be about to"
    now_s += 2
    answer(worker, "router a:1: not registered")
    assert worker.said == "it serves, and no router has it: router a:1: not registered"
    answer(worker)
    assert worker.said == ""


def test_one_that_has_drained_is_said_to(
    worker: Supervised, said: list[str], ended: list[Any]
) -> None:
    answer(worker)
    assert worker.state is not None
    worker.asked = replace(worker.state, has_drained=True)
    worker.hear()
    assert ended == ["first life"]
    assert said[-1] == "worker decode-0: it has drained; a new one in 0 s"
    assert worker.fault == ""


def test_an_answer_of_an_older_release_has_the_defaults_of_what_it_lacks(
    worker: Supervised,
) -> None:
    answer(worker)
    older = pickle.loads(pickle.dumps(worker.state))
    for name in ("has_drained", "is_stopping"):
        object.__delattr__(older, name)
    worker.asked = pickle.loads(pickle.dumps(older))
    worker.hear()
    assert worker.serves


def test_so_has_one_of_a_release_whose_answers_had_slots(
    worker: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pickles hold a list."""

    @dataclass(frozen=True, slots=True)
    class Slotted:
        worker_id: str
        role: str
        epoch: str
        address: str
        node_id: str
        pid: int
        summary: str
        refused: str

    Slotted.__module__, Slotted.__qualname__ = WorkerState.__module__, WorkerState.__qualname__
    with monkeypatch.context() as older:
        older.setattr(actor, "WorkerState", Slotted)
        said = pickle.dumps(Slotted("decode-0", "decode", "e", "a:1", "host", 1, "all", ""))
    worker.asked = pickle.loads(said)
    worker.hear()
    assert worker.state == WorkerState("decode-0", "decode", "e", "a:1", "host", 1, "all", "")
    assert worker.serves


def test_one_that_was_found_and_may_drain_has_the_time_for_it(
    worker: Supervised, monkeypatch: pytest.MonkeyPatch, ended: list[Any]
) -> None:
    """It answers nothing while it drains, as the last supervisor has asked it to."""
    found = Found()
    worker.actor = worker.heard = found
    worker.leave(10.0, 60.0)
    assert (found.stops, ended) == ([(10.0, 60.0)], [])
    done: list[object] = []
    monkeypatch.setattr(ray, "wait", lambda waiting, timeout: (done, waiting))
    worker.end_if_left()
    assert ended == []
    monkeypatch.setattr(time, "monotonic", lambda: worker.left_by_s)
    worker.end_if_left()
    assert ended == [found]


def test_one_that_starts_leaves_at_once(worker: Supervised, ended: list[Any]) -> None:
    worker.leave(10.0, 60.0)
    assert ended == ["first life"]


def test_nothing_refers_to_the_actor_of_a_life_that_has_ended(worker: Supervised) -> None:
    """Ray would keep its name, and no other could be started."""
    worker.actor = Actor()
    last = weakref.ref(worker.actor)
    answer(worker)
    assert last() is not None
    worker._ended("killed")
    assert last() is None


class Actor:
    """Stands for a handle of Ray's."""


class Found:
    """Likewise, of one that can be asked to stop."""

    def __init__(self) -> None:
        self.stops: list[tuple[float, float]] = []
        self.stop = self

    def remote(self, stop_s: float, drain_s: float) -> object:
        self.stops.append((stop_s, drain_s))
        return "its answer"
