"""Which process has a worker's id: one at a time, and none that had it before another."""

from collections import deque

from disagg.errors import WorkerIdTakenError
from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo

LATEST_MAX = 4096
RETIRED_MAX = 1024


class WorkerLives:
    """The last life of each worker id, and lives that another has followed, as far as known."""

    def __init__(self) -> None:
        self._latest: dict[str, Incarnation] = {}
        self._retired: deque[Incarnation] = deque(maxlen=RETIRED_MAX)

    def check(self, info: WorkerInfo, holder: WorkerInfo | None) -> None:
        """Whether a worker may have its id.

        Args:
            info: it, as it registers.
            holder: who has that id in the fleet.

        Raises:
            WorkerIdTakenError: another life has this id, or has had it since.
        """
        name, epoch = info.incarnation.worker_id, info.incarnation.epoch
        if holder is not None and holder.incarnation != info.incarnation:
            raise WorkerIdTakenError(
                f"{name!r} is the worker of epoch {holder.incarnation.epoch} at {holder.address}, "
                f"which is alive; {epoch} at {info.address} is refused until it has gone",
                param="worker_id",
            )
        if info.incarnation in self._retired:
            # A cut-off process may live on beside its successor; it must not take the place back.
            latest = self._latest.get(name)  # forgotten where many ids have come since
            successor = f"epoch {latest.epoch}" if latest is not None else "another one"
            raise WorkerIdTakenError(
                f"{name!r} of epoch {epoch} at {info.address} was lost, and {successor} has taken "
                "its place: this process has to end",
                param="worker_id",
            )

    def begin(self, incarnation: Incarnation) -> None:
        """A life takes the place of the last one of its id, if that was another, lost or not."""
        latest = self._latest.pop(incarnation.worker_id, incarnation)
        if latest != incarnation:
            self._retired.append(latest)
        self._latest[incarnation.worker_id] = incarnation
        if len(self._latest) > LATEST_MAX:
            del self._latest[next(iter(self._latest))]
