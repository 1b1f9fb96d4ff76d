"""The sessions that routers have with this worker, each with a router's id."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.errors import CapacityError
from disagg.messages.session import ToRouterMessage, router_of
from disagg.messages.stats import WorkerStats
from disagg.scheduling.told_stats import ToldStats

log = logging.getLogger(__name__)

Send = Callable[[ToRouterMessage], None]
End = Callable[[str], None]


@dataclass(slots=True)
class _Session:
    send: Send
    end: End
    told: ToldStats = field(default_factory=ToldStats)


class RouterSessions:
    """One session per router; what is for one router goes to no other.

    Args:
        routers_max: sessions at a time.
    """

    def __init__(self, routers_max: int) -> None:
        self._routers_max = routers_max
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def check_room(self, router: str) -> None:
        """Raise CapacityError if one more router is one too many."""
        if router not in self._sessions and len(self._sessions) >= self._routers_max:
            log.warning("router %s is refused: %d have sessions", router, len(self._sessions))
            raise CapacityError(
                f"{len(self._sessions)} routers have sessions (worker.routers_max)",
                param="worker.routers_max",
            )

    def open(self, router: str, send: Send, end: End) -> None:
        """Take in a session, which gets the next stats; the router has no other one."""
        log.info("router %s opened a session", router)
        self._sessions[router] = _Session(send, end)

    def take(self, router: str) -> End | None:
        """Forget a router's session, if it has one; returns what ends its stream."""
        session = self._sessions.pop(router, None)
        return None if session is None else session.end

    def is_open(self, router: str, send: Send) -> bool:
        """Whether this is the router's session; no later one of it has taken its place."""
        session = self._sessions.get(router)
        return session is not None and session.send is send

    def send(self, message: ToRouterMessage) -> None:
        """Send to the router that the message is for, or to all; lost where there is no session."""
        if router := router_of(message):
            session = self._sessions.get(router)
            if session is not None:
                session.send(message)
            return
        for session in list(self._sessions.values()):
            session.send(message)

    def report(self, now_ms: int, stats: WorkerStats, *, loaded: bool, pace_ms: int = 0) -> None:
        """Send stats to everybody who has to have them; see `ToldStats.is_due`."""
        for session in list(self._sessions.values()):
            if session.told.is_due(now_ms, stats, loaded=loaded, pace_ms=pace_ms):
                session.send(stats)

    def report_again(self, router: str) -> None:
        """Let a router have the next stats in any case; see `ToldStats.tell_again`."""
        session = self._sessions.get(router)
        if session is not None:
            session.told.tell_again()
