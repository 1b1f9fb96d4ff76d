"""When it is said that a worker does not serve, and why it cannot be created."""

from pathlib import Path

import pytest
from ray.exceptions import ActorAlreadyExistsError

from disagg.cluster import supervise
from disagg.cluster.supervise import Supervisor
from disagg.cluster.supervised import Supervised
from disagg.cluster.worker_actors import ActorName
from disagg.config import Settings


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


def test_one_whose_needs_ray_refuses_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    cluster = {"hash_key": "ab" * 32, "num_decode": 0}
    given = {"model": {"dir": str(tmp_path)}, "cluster": cluster}
    said: list[str] = []
    supervisor = Supervisor(Settings.model_validate(given), said.append)
    supervisor._follow(None)
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
