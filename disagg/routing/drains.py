"""Which workers an operator means who wants a worker, or a host, to be free, and their orders."""

from collections.abc import Sequence

from disagg.errors import RequestError
from disagg.messages.session import CallOffDrain, Drain
from disagg.routing.actions import ToWorker
from disagg.routing.worker_view import WorkerView


def host_of(address: str) -> str:
    """The host of a worker's ``host:port``."""
    return address.rpartition(":")[0].strip("[]")


def workers_named(views: Sequence[WorkerView], name: str) -> tuple[list[WorkerView], bool]:
    """The worker of that id, or all workers of that host.

    Returns:
        The workers, and whether it is a host's name.

    Raises:
        RequestError: there is neither, there is no session with one of them, or one is of a release
            that knows no drain.
    """
    chosen = [view for view in views if view.info.incarnation.worker_id == name]
    is_host = not chosen
    if is_host:
        chosen = [view for view in views if host_of(view.info.address) == name]
    if not chosen:
        workers = ", ".join(view.info.incarnation.worker_id for view in views) or "none"
        hosts = ", ".join(sorted({host_of(view.info.address) for view in views})) or "none"
        raise RequestError(
            f"{name[:200]!r} is no worker and no host; workers: {workers}; hosts: {hosts}",
            param="name",
        )
    for view in chosen:
        who = view.info.incarnation.worker_id
        if not view.connected:
            raise RequestError(f"there is no session with worker {who} now", param="name")
        if not view.info.takes_drain:
            raise RequestError(
                f"worker {who} is too old: its release knows no drain; SIGTERM drains it",
                param="name",
            )
    return chosen, is_host


def drain_orders(
    views: Sequence[WorkerView], name: str, timeout_ms: int, *, undo: bool = False
) -> list[ToWorker]:
    """What to tell whom, so that a worker drains and ends, or the workers of a host drain and stay.

    Those of a host stay, without work, as their supervisor would start others there at once.

    Raises:
        RequestError: naming the field.
    """
    chosen, is_host = workers_named(views, name)
    if undo and not is_host:
        raise RequestError("a worker that drains ends; only a host's drain is undone", param="undo")
    order = CallOffDrain() if undo else Drain(timeout_ms, ends=not is_host)
    return [ToWorker(view.info.incarnation, order) for view in chosen]
