"""Roles that the fleet is to have: which are missing, and whether all have been there."""

from collections.abc import Sequence

from disagg.routing.core import RouterCore


class WantedRoles:
    """Of the workers that a core knows.

    A fleet that is half started is not complete: its first requests would not be handed over. A
    role that is lost later does not change that while a worker is left, which still serves every
    request; clients would get nothing if a load balancer took the router out.

    Args:
        core: knows the workers.
        wanted: each needs a ready worker; ``both`` counts as either.

    Attributes:
        were_complete: all were there at once, and some worker has been since.
    """

    def __init__(self, core: RouterCore, wanted: Sequence[str]) -> None:
        self.were_complete = False
        self._core = core
        self._wanted = wanted

    @property
    def missing(self) -> list[str]:
        """Those for which no worker is ready now, in the most complete revision serving."""
        ready = {(view.info.revision, view.info.role) for view in self._core.fleet if view.ready}
        missing = [
            [
                role
                for role in self._wanted
                if ready.isdisjoint(((one.name, role), (one.name, "both")))
            ]
            for one in self._core.serving
        ]
        return min(missing, key=len, default=list(self._wanted))

    def worker_heard(self) -> None:
        """A worker has said how it is: it may be the last one that was missing."""
        if not self.were_complete:
            self.were_complete = not self.missing

    def worker_left(self) -> None:
        """A worker has gone."""
        if not self._core.ready:
            self.were_complete = False  # nobody is left: a new fleet starts
