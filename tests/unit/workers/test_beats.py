"""A router hears a worker that has work also while nothing changes there."""

from dataclasses import replace

from disagg.messages.session import ToRouterMessage
from disagg.messages.stats import WorkerStats
from disagg.scheduling.told_stats import BEAT_MS
from disagg.workers.router_sessions import RouterSessions

STATS = WorkerStats(0, 1, 0, 100, 90, 0, 0, 0, 0, ready=True)


def test_the_same_stats_are_sent_again_while_something_goes_on() -> None:
    sent: list[ToRouterMessage] = []
    sessions = RouterSessions(2)
    sessions.open("r", sent.append, lambda reason: None)
    sessions.report(0, STATS, loaded=True)
    sessions.report(BEAT_MS - 1, STATS, loaded=True)
    assert sent == [STATS]
    sessions.report(BEAT_MS, STATS, loaded=True)
    assert sent == [STATS, STATS]
    changed = replace(STATS, num_running=0)
    sessions.report(BEAT_MS + 1, changed, loaded=False)
    assert sent == [STATS, STATS, changed]
    sessions.report(1000 * BEAT_MS, changed, loaded=False)  # nothing goes on
    assert sent == [STATS, STATS, changed]


def test_a_router_that_has_many_workers_hears_less_often_of_changes() -> None:
    sent: list[ToRouterMessage] = []
    sessions = RouterSessions(2)
    sessions.open("r", sent.append, lambda reason: None)

    def report(now_ms: int, num_running: int, *, draining: bool = False) -> list[ToRouterMessage]:
        del sent[:]
        stats = replace(STATS, num_running=num_running, draining=draining)
        sessions.report(now_ms, stats, loaded=True, pace_ms=1_000)
        return list(sent)

    assert report(5, 1), "a session that is new is told at once"
    assert not report(105, 2)
    assert not report(1_004, 3), "nor is it a beat before its time"
    assert report(1_005, 3)
    assert not report(1_105, 3)
    assert report(2_005, 3), "beats go on at this pace"
    sessions.report_again("r")
    assert report(2_105, 3), "what it has submitted is in the next ones"
    assert report(2_205, 3, draining=True), "nothing more is to be planned here"
    assert not report(2_305, 4, draining=True)
