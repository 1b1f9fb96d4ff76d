"""The sessions with all workers: opened, found, closed, and at last ended together."""

import asyncio
from collections.abc import Iterator

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.router.worker_session import SessionEvents, WorkerSession
from disagg.tls.connections import Connections
from disagg.wire.session_encoder import SessionEncoder


class WorkerSessions:
    """One with each incarnation of a worker, from its dial on. Used from one event loop.

    Iterated, those there are at the beginning: who iterates may open and close some.

    Args:
        router_id: what the router is called at workers.
        outgoing_max: messages that may wait for one worker.
        connections: what dials.
    """

    def __init__(self, router_id: str, outgoing_max: int, connections: Connections) -> None:
        self._router_id = router_id
        self._outgoing_max = outgoing_max
        self._connections = connections
        self._encoder = SessionEncoder()
        self._sessions: dict[Incarnation, WorkerSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[WorkerSession]:
        return iter(tuple(self._sessions.values()))

    def get(self, worker: Incarnation) -> WorkerSession | None:
        """The session with a worker; None: it is closed, or there never was one."""
        return self._sessions.get(worker)

    def open(self, info: WorkerInfo, events: SessionEvents) -> None:
        """Dial a worker; it is reported to ``events`` until it is lost or closed."""
        self._sessions[info.incarnation] = WorkerSession(
            self._router_id,
            info,
            events,
            self._outgoing_max,
            self._connections,
            self._encoder,
        )

    def close(self, worker: Incarnation) -> None:
        """End the session with a worker, which there is; nothing more is reported of it."""
        session = self._sessions.pop(worker)
        session.close()
        closing = asyncio.create_task(session.wait_closed())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        """Write what is queued, for a short time, and end all of them."""
        sessions = list(self)
        for session in sessions:
            await session.drain()
            session.close()
        await asyncio.gather(*(session.wait_closed() for session in sessions), *self._closing)
