"""How often workers should report: the more there are, the less often each of them."""

from disagg.messages.frozen import dataclass

HEARTBEATS_PER_S = 100
"""Of all workers. Each is a call of its own, of some 0.5 ms of the router's process."""
STATS_PER_S = 250
"""Of all busy workers, and as many batches of KV events; most of the 0.3 ms is carrying one."""
STATS_MS_MAX = 1_000
"""Plans go by loads that are no older, whatever the fleet's size."""


@dataclass(frozen=True, slots=True)
class ReportPace:
    """What a router asks of each worker, which need not be slower by itself; 0: nothing."""

    heartbeat_ms: int
    """At least so long between two registrations."""
    stats_ms: int
    """And between two stats of which none is urgent, and between two batches of KV events."""


def report_pace(num_workers: int, silent_ms: int, silent_busy_ms: int) -> ReportPace:
    """The pace at which all workers together do not keep the router from its requests.

    Args:
        num_workers: that the router knows.
        silent_ms: without a sign of life a worker is lost after so long.
        silent_busy_ms: the same of one that is busy.
    """
    return ReportPace(
        min(1000 * num_workers // HEARTBEATS_PER_S, silent_ms // 3),
        min(1000 * num_workers // STATS_PER_S, 2 * silent_busy_ms // 3, STATS_MS_MAX),
    )
