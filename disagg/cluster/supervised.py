"""One worker's actor, as its supervisor knows it."""

from dataclasses import dataclass, field
from typing import Any

from disagg.cluster.back_off import BackOff
from disagg.cluster.worker_actors import ActorName
from disagg.workers.actor import WorkerState


@dataclass(slots=True)
class Supervised:
    """One actor, from the supervisor's point of view."""

    name: ActorName
    is_wanted: bool = True
    actor: Any = None
    """None: it is to be created."""
    asked: Any = None
    """The one answer that is outstanding."""
    node_id: str = ""
    """Where it is, or is to be; "" where Ray chooses."""
    leaving: Any = None
    """Its answer, when it has been asked to end."""
    left_by_s: float = 0.0
    state: WorkerState | None = None
    serves: bool = False
    is_awaited: bool = False
    """It has taken the place of one that served."""
    create_at_s: float = 0.0
    late_at_s: float = 0.0
    """When it is said that it does not serve yet."""
    fault: str = ""
    """Why its last life ended without serving."""
    said: str = ""
    back_off: BackOff = field(default_factory=BackOff)

    @property
    def worker_id(self) -> str:
        """Whose actor it is."""
        return self.name.worker_id

    @property
    def role(self) -> str:
        """Of the worker, as its id says."""
        return self.worker_id.rpartition("-")[0]

    @property
    def key(self) -> str:
        """Its worker's id; of one that is not wanted any more its actor's name."""
        return self.worker_id if self.is_wanted else str(self.name)
