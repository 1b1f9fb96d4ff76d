"""What workers say of their pools, leases and transfers when they are asked."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from disagg.errors import RemoteFault
from disagg.messages.identity import Incarnation
from disagg.router.worker_session import WorkerSession
from disagg.wire.v1 import worker_pb2

LOOK_S = 0.5
"""So old an answer is given again: a worker is asked twice a second, however many look."""
ASKED_MAX = 64
"""At once, as each answer takes the router some tenths of a millisecond: a fleet of 1,000 is asked
in 8 s, and does not take a third of its time while somebody looks at it."""
TIMEOUT_S = 1.5
"""A worker that is busy with a step answers between two of them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One worker's, or why there is none."""

    status: worker_pb2.StatusResponse | None
    error: str = ""


class WorkerStatuses:
    """Workers' answers, which those who look at the same moment share.

    Args:
        sessions: to the workers there are.
    """

    def __init__(self, sessions: Callable[[], Sequence[WorkerSession]]) -> None:
        self._sessions = sessions
        self._answers: dict[Incarnation, Answer] = {}
        """The oldest first."""
        self._asked_s = 0.0
        self._look: asyncio.Task[Mapping[Incarnation, Answer]] | None = None

    async def look(self) -> Mapping[Incarnation, Answer]:
        """Ask workers; takes `TIMEOUT_S` where one does not answer.

        Of more than `ASKED_MAX` those who were asked longest ago; the others said it before.
        """
        now_s = asyncio.get_running_loop().time()
        if self._look is None or (self._look.done() and now_s - self._asked_s >= LOOK_S):
            self._asked_s = now_s
            self._look = asyncio.create_task(self._ask(), name="statuses of workers")
        # Who leaves must not take along what others wait for.
        return await asyncio.shield(self._look)

    async def _ask(self) -> Mapping[Incarnation, Answer]:
        sessions = {one.info.incarnation: one for one in self._sessions()}
        known = {who: answer for who, answer in self._answers.items() if who in sessions}
        asked = [*(who for who in sessions if who not in known), *known][:ASKED_MAX]
        answers = await asyncio.gather(*(_answer(sessions[who]) for who in asked))
        for who, answer in zip(asked, answers, strict=True):
            known.pop(who, None)
            known[who] = answer
        self._answers = known
        return known


async def _answer(session: WorkerSession) -> Answer:
    try:
        return Answer(await session.status(TIMEOUT_S))
    except RemoteFault as error:
        return Answer(None, error.message)
