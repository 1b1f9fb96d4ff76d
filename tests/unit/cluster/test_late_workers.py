"""When it is said that a worker does not serve, and why it cannot be created."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorAlreadyExistsError

from disagg.cluster import supervise, supervised, worker_actors
from disagg.cluster.supervise import Supervisor
from disagg.cluster.supervised import Supervised
from disagg.cluster.worker_actors import ActorName, ActorNeeds, create_actor
from disagg.config import Settings
from disagg.workers.actor import WorkerState


def test_a_worker_that_starts_again_has_as_long_as_one_that_starts() -> None:
    worker = Supervised(ActorName("decode-0", "1"), "decode", print, late_at_s=300.0)
    worker.actor = object()
    assert [worker.is_late(now_s, 300.0) for now_s in (299.0, 301.0, 302.0)] == [False, True, False]
    worker.serves = True
    assert not worker.is_late(1_000.0, 300.0)
    worker.serves = False  # it has just ended
    assert not worker.is_late(1_001.0, 300.0)
    worker.actor = None
    assert not worker.is_late(1_301.0, 300.0), "what is to be created waits for something else"
    worker.actor = object()
    assert worker.is_late(1_302.0, 300.0)
    assert not worker.is_late(1_303.0, 300.0)


def one_worker(folder: Path, said: list[str]) -> Supervisor:
    (folder / "config.json").write_text("{}")
    cluster = {"hash_key": "ab" * 32, "num_decode": 0, "start_timeout_s": 100, "stop_timeout_s": 10}
    given = {
        "model": {"dir": str(folder)},
        "cluster": cluster,
        "worker": {"drain_timeout_ms": 200_000},
    }
    supervisor = Supervisor(Settings.model_validate(given), said.append)
    supervisor._follow(None)
    return supervisor


def test_one_whose_needs_ray_refuses_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    supervisor = one_worker(tmp_path, said)
    (worker,) = supervisor.workforce.workers

    def refuse(error: Exception) -> None:
        def create(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(supervise, "create_actor", create)
        supervisor._create(worker)

    refuse(ActorAlreadyExistsError("the last one's name is not free yet"))
    assert worker.fault == ""
    refuse(ValueError("GPU resource quantities >1 must be whole numbers."))
    assert said[-1] == f"worker prefill-0: {worker.fault}"
    assert worker.fault == "Ray refuses it: GPU resource quantities >1 must be whole numbers."
    assert time.monotonic() >= worker.create_at_s, "settings may have been changed just now"
    refuse(ValueError("GPU resource quantities >1 must be whole numbers."))
    assert time.monotonic() < worker.create_at_s, "Ray is not asked at every look"


def test_what_ray_refuses_has_nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: set[str] = set()

    class Remote:
        def options(self, **_: object) -> "Remote":
            return self

        def remote(self, *_: object) -> None:
            raise ValueError("no such needs")

    def reserve(*_: object, name: str, **__: object) -> str:
        groups.add(name)
        return name

    monkeypatch.setattr(worker_actors, "placement_group", reserve)
    monkeypatch.setattr(worker_actors, "remove_group", lambda name: groups.discard(str(name)))
    monkeypatch.setattr(ray, "remote", lambda _: Remote())
    needs = ActorNeeds(1, 0, {}, ({"CPU": 1.0},))
    options: Any = None
    with pytest.raises(ValueError, match="no such needs"):
        create_actor(ActorName("decode-0", "1"), options, "", needs, "", lasting=True)
    assert not groups


@pytest.mark.parametrize(("is_unheard", "patience_s"), [(True, 310), (False, 100)])
def test_one_that_was_found_may_drain_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_unheard: bool, patience_s: int
) -> None:
    """The last supervisor may have asked it to, and nothing else is answered meanwhile."""
    supervisor = one_worker(tmp_path, [])
    (worker,) = supervisor.workforce.workers
    worker.actor = worker.heard = worker.asked = "found"
    if not is_unheard:
        worker.state = WorkerState("prefill-0", "prefill", "e", "a:1", "host", 1, "", "")
    ended: list[object] = []
    monkeypatch.setattr(supervised, "end_actor", lambda name, actor: ended.append(actor))
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    supervisor._go_on(worker)
    while not ended and now_s < 1_000:
        now_s += 1
        supervisor._go_on(worker)
    assert now_s == patience_s
