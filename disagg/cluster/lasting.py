"""Supervises lasting workers whenever this process is in charge of them, else stands by."""

from collections.abc import Callable
from typing import NoReturn

from disagg.cluster.charge import Charge
from disagg.cluster.claims import SILENT_S
from disagg.cluster.supervise import Supervisor
from disagg.config import Settings
from disagg.errors import ChargeLostError
from disagg.workers.actor import WORKER_PATH

_TAKE_TIMEOUT_S = 2 * SILENT_S


class LastingSupervision:
    """The workers of these settings in the Ray cluster this process is connected to.

    Several processes may run this for one cluster: one is in charge, another one takes over when
    that one ends, stands still or loses the cluster, and finds the workers as they are.
    """

    def __init__(
        self, settings: Settings, report: Callable[[str], None], worker_path: str = WORKER_PATH
    ) -> None:
        self._settings = settings
        self._report = report
        self._worker_path = worker_path
        self._charge = Charge(report)

    def run(self, see: Callable[[], None], tell: Callable[[Supervisor], None]) -> NoReturn:
        """Go on until something is raised, by ``see`` or a signal handler among others.

        Args:
            see: called whenever something has gone on.
            tell: called whenever this process is in charge and has looked at its workers.

        Raises:
            ExpiredError: Ray's head does not answer, or this host has left the cluster.
        """
        while True:
            self._charge.take(see)
            supervisor = self._supervisor(see)
            try:
                supervisor.start()
                while True:
                    supervisor.poll()
                    see()
                    tell(supervisor)
            except ChargeLostError as error:
                self._report(error.message)
            finally:
                supervisor.close()

    def end_workers(self, see: Callable[[], None], on_begin: Callable[[Supervisor], None]) -> None:
        """End the workers that run, once no other process is in charge of them.

        Args:
            see: called whenever something has gone on.
            on_begin: called before they are asked to end.

        Raises:
            ExpiredError: a supervisor runs, which would start them again.
        """
        self._charge.take(see, _TAKE_TIMEOUT_S)
        supervisor = self._supervisor(see)
        on_begin(supervisor)
        supervisor.find()
        supervisor.stop(drain=True)
        self._report("no worker runs any more")

    def end(self) -> None:
        """Let another process take over; workers stay."""
        self._charge.give_back()

    def _supervisor(self, see: Callable[[], None]) -> Supervisor:
        def confirm() -> None:
            self._charge.confirm()
            see()  # hosts may be waited for, or workers' drains, for longer than Ray's silence

        return Supervisor(
            self._settings,
            self._report,
            self._worker_path,
            lasting=True,
            confirm=confirm,
        )
