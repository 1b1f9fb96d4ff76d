"""When it is said that a worker does not serve."""

from disagg.cluster.supervised import Supervised
from disagg.cluster.worker_actors import ActorName


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
