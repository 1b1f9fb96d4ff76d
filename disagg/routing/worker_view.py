"""What is shown of a worker."""

from dataclasses import dataclass

from disagg.messages.registration import WorkerInfo
from disagg.messages.stats import WorkerStats
from disagg.routing.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it at one moment, for health pages."""

    info: WorkerInfo
    connected: bool
    ready: bool
    """It is connected, and its last stats have ``ready`` set."""
    stats: WorkerStats | None
    heard_ms: int
    """Time of its last registration or message."""
    planned_requests: int
    """Requests submitted to it since its last stats."""
    planned_tokens: int
    """Tokens that it has to prefill for those."""
    num_live: int
    """Live generations in which it has a part."""
    index_entries: int


def view_of(worker: Worker, num_live: int) -> WorkerView:
    """A worker at this moment, and in how many live generations it has a part."""
    return WorkerView(
        info=worker.info,
        connected=worker.connected,
        ready=worker.ready,
        stats=worker.stats,
        heard_ms=worker.heard_ms,
        planned_requests=worker.planned_requests,
        planned_tokens=worker.planned_tokens,
        num_live=num_live,
        index_entries=worker.index.num_entries(worker.info.incarnation),
    )
