"""A router hears a worker that has work also while nothing changes there."""

from dataclasses import replace

from disagg.messages.session import ToRouterMessage, WorkerStats
from disagg.workers.router_sessions import BEAT_MS, RouterSessions

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
