"""One worker's actor, from its creation to its end, as its supervisor knows it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from disagg.cluster.back_off import BackOff
from disagg.cluster.child import MEMORY
from disagg.cluster.worker_actors import ActorName, end_actor, remove_group
from disagg.workers.actor import WorkerState

Report = Callable[[str], None]

_SILENT_S = 30.0
"""One that has not answered for so long does not serve, as far as its supervisor knows."""
_REGISTERS_S = 5.0
"""After which it is said that no router has one that serves."""
_UNSEEN_S = 2.0
_WITHOUT_A_WORD = "Worker unexpectedly exits"
"""In what Ray says where all it knows is that the connection ended, and then guesses why."""
_NEVER_RAN = "The actor never ran"
"""What Ray says last of one that ended while it was made; why it did stands before it."""


@dataclass(slots=True)
class Supervised:
    """One actor: asked how it is again and again, at last asked to leave.

    Attributes:
        name: of the actor; another one once it has been created with other settings.
        role: that it is to have; one that runs takes it as it is asked how it is.
        report: takes a line whenever something changed.
        late_at_s: when it is said that it does not serve, unless it does before.
    """

    name: ActorName
    role: str
    report: Report
    late_at_s: float = float("inf")
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
    fault: str = ""
    """Why its last life ended without serving."""
    said: str = ""
    heard: Any = None
    """The actor, once it is known to have served; no other, as Ray keeps the name of one that is
    referred to."""
    unknown_since_s: float = 0.0
    looked_s: float = float("inf")
    silent_s: float = 0.0
    """Since its last answer, as far as its supervisor ran itself."""
    back_off: BackOff = field(default_factory=BackOff)

    @property
    def worker_id(self) -> str:
        """Whose actor it is."""
        return self.name.worker_id

    @property
    def key(self) -> str:
        """Its worker's id; of one that is not wanted any more its actor's name."""
        return self.worker_id if self.is_wanted else str(self.name)

    @property
    def is_unheard(self) -> bool:
        """It was created, and has never answered."""
        return self.actor is not None and self.state is None

    @property
    def serves_as_wanted(self) -> bool:
        """It answered last, and has its role."""
        return self.serves and self.state is not None and self.state.role == self.role

    def is_late(self, now_s: float, patience_s: float) -> bool:
        """Whether it is to be said now, once, that it has not served for so long."""
        if self.serves:
            self.late_at_s = now_s + patience_s  # what it is given when it has to start again
        if self.late_at_s > now_s or not self.is_wanted or self.actor is None:
            return False
        self.late_at_s = float("inf")
        return True

    def ask(self, *, takes_roles: bool) -> None:
        """Ask how it is, unless an answer is outstanding.

        Args:
            takes_roles: it runs with the settings as they are, and only its role may be another.
        """
        if self.actor is None or self.asked is not None or self.leaving is not None:
            return
        if takes_roles and self.serves and not self.serves_as_wanted:
            self.report(f"worker {self.worker_id} takes the role {self.role}")
            self.asked = self.actor.set_role.remote(self.role)
        else:
            self.asked = self.actor.describe.remote()

    def hear(self) -> None:
        """Take the answer, which has come."""
        answer, self.asked = self.asked, None
        try:
            self._heard(ray.get(answer))
        except ActorUnavailableError as error:  # it may answer again
            self.say(last_line(error))
            self.serves = False
        except RayError as error:  # its process has ended
            remove_group(self.name)  # what comes next may have another name
            self._ended(why_ended(error, self.state.pid if self.state is not None else None))

    def see_silence(self, now_s: float, patience_s: float) -> None:
        """Count how long one that has served does not answer; it hangs if that is for too long.

        Who stood still itself has heard nobody: so much of the time between two looks counts.
        """
        self.silent_s += min(max(0.0, now_s - self.looked_s), _UNSEEN_S)
        self.looked_s = now_s
        if self.actor is None or self.heard is not self.actor or self.leaving is not None:
            self.silent_s = 0.0  # one that starts may take its time
        elif self.silent_s >= patience_s:
            end_actor(self.name, self.actor)
            self.asked = None
            self._ended(f"it has not answered for {patience_s:g} s")
            self.fault = ""  # it has served
        elif self.silent_s >= _SILENT_S and self.serves:
            self.say(f"it has not answered for {_SILENT_S:g} s")
            self.serves = False

    def leave(self, stop_s: float, drain_s: float) -> None:
        """Let it end; one that serves drains first, and so may one that was found.

        Args:
            stop_s: how long its stop may take.
            drain_s: how long what goes on may take before that.
        """
        if self.actor is None:
            self.leaving = None
        elif self.serves or (self.is_unheard and self.heard is self.actor):
            self.is_awaited = self.is_wanted
            self.ask_to_leave(stop_s, drain_s)
        else:
            end_actor(self.name, self.actor)
            self.actor = self.asked = self.heard = None

    def ask_to_leave(self, stop_s: float, drain_s: float) -> None:
        """Ask it to end, whether it serves or not."""
        self.leaving = self.actor.stop.remote(stop_s, drain_s)
        self.left_by_s = time.monotonic() + drain_s + stop_s
        self.asked, self.serves = None, False

    def end_if_left(self) -> None:
        """End the actor of a worker that was asked to leave, once it has, or is late."""
        if self.leaving is None:
            return
        done, _ = ray.wait([self.leaving], timeout=0)
        if not done and time.monotonic() < self.left_by_s:
            return
        if self.actor is not None:
            end_actor(self.name, self.actor)
        self.actor = self.asked = self.leaving = self.heard = None
        self.serves = False

    def say(self, reason: str) -> None:
        """Report why it does not serve, once."""
        if reason != self.said:
            self.report(f"worker {self.worker_id}: {reason}")
        self.said = reason

    def _heard(self, state: WorkerState) -> None:
        if state.refused or state.is_stopping or state.has_drained:
            end_actor(self.name, self.actor)
            why = "it has drained" if state.has_drained else "it was being stopped"
            self._ended(state.refused or why)
            return
        if self.state is None or self.state.epoch != state.epoch:
            again = " again" if self.state is not None else ""
            self.report(
                f"worker {state.worker_id} serves{again} on {state.address}"
                f" (pid {state.pid}, epoch {state.epoch})"
            )
            if self.state is None or self.state.summary != state.summary:
                self.report(f"worker {state.worker_id} takes {state.summary}")
        if self.heard is not self.actor or not state.unregistered:
            self.unknown_since_s = time.monotonic()
        self.heard = self.actor
        self.state, self.serves, self.is_awaited, self.silent_s = state, True, False, 0.0
        if time.monotonic() - self.unknown_since_s >= _REGISTERS_S:
            self.say(f"it serves, and no router has it: {state.unregistered}")
        else:
            self.said = ""
        self.node_id = state.node_id  # Ray may have started it elsewhere
        self.back_off.runs(time.monotonic())

    def _ended(self, reason: str) -> None:
        served = self.serves
        self.actor, self.heard, self.serves, self.silent_s = None, None, False, 0.0
        if not self.is_wanted or self.leaving is not None:
            return
        self.fault = "" if served else reason
        delay_s = self.back_off.ended(time.monotonic())
        self.say(f"{reason}; a new one in {delay_s:g} s")
        self.create_at_s = time.monotonic() + delay_s


def why_ended(error: RayError, pid: int | None) -> str:
    """What there is to say of a worker's process that has ended.

    Args:
        error: Ray's.
        pid: of the process; None: it has not served.
    """
    if _WITHOUT_A_WORD not in str(error):
        return last_line(error)
    process = "its process" if pid is None else f"its process {pid}"
    log = "logs/worker-*.err" if pid is None else f"logs/worker-*-{pid}.err"
    return (
        f"{process} has ended; where its log ({log} in Ray's folder) does not say why it was"
        f" killed, {MEMORY}"
    )


def last_line(error: Exception) -> str:
    """Of a text that may hold a traceback, what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_NEVER_RAN)]
    return lines[-1] if lines else type(error).__name__
