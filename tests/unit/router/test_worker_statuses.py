"""Who looks at a fleet asks its workers, some of a large one at a time."""

from types import SimpleNamespace

from disagg.errors import RemoteFault
from disagg.messages.identity import Incarnation
from disagg.router.worker_statuses import ASKED_MAX, LOOK_S, WorkerStatuses
from disagg.wire.v1 import worker_pb2


class Session:
    """Counts how often its worker was asked; a busy one does not answer."""

    def __init__(self, name: str, *, busy: bool = False) -> None:
        self.info = SimpleNamespace(incarnation=Incarnation(name, "e"))
        self.num_asked = 0
        self.busy = busy

    async def status(self, timeout_s: float) -> worker_pb2.StatusResponse:
        assert timeout_s > 0
        self.num_asked += 1
        if self.busy:
            raise RemoteFault("no answer in time")
        return worker_pb2.StatusResponse(version=f"{self.num_asked}")


def later(statuses: WorkerStatuses) -> None:
    """The last answers are too old to be given again."""
    statuses._asked_s -= 2 * LOOK_S


async def test_who_looks_at_the_same_moment_asks_once() -> None:
    sessions = [Session("a"), Session("b", busy=True)]
    statuses = WorkerStatuses(lambda: sessions)  # type: ignore[arg-type,return-value]
    for _ in range(2):
        found = await statuses.look()
        assert found[Incarnation("a", "e")].status is not None
        assert found[Incarnation("b", "e")].error == "no answer in time"
    assert [one.num_asked for one in sessions] == [1, 1]
    later(statuses)
    await statuses.look()
    assert [one.num_asked for one in sessions] == [2, 2], "control: later"


async def test_a_large_fleet_is_asked_in_turns() -> None:
    sessions = [Session(f"w{number}") for number in range(2 * ASKED_MAX + 9)]
    statuses = WorkerStatuses(lambda: sessions)  # type: ignore[arg-type,return-value]
    num_known, asked = [], 0
    for _ in range(4):
        found = await statuses.look()
        num_known.append(sum(answer.status is not None for answer in found.values()))
        now = sum(one.num_asked for one in sessions)
        assert now - asked == ASKED_MAX
        asked = now
        later(statuses)
    assert num_known == [ASKED_MAX, 2 * ASKED_MAX, *2 * [2 * ASKED_MAX + 9]]
    assert {one.num_asked for one in sessions} == {1, 2}, "by turns"


async def test_who_left_is_shown_no_more_and_who_comes_is_asked_first() -> None:
    sessions = [Session(f"w{number}") for number in range(ASKED_MAX + 1)]
    statuses = WorkerStatuses(lambda: sessions)  # type: ignore[arg-type,return-value]
    await statuses.look()
    gone, new = sessions.pop(0), Session("new")
    sessions.append(new)
    later(statuses)
    found = await statuses.look()
    assert gone.info.incarnation not in found
    assert found[new.info.incarnation].status is not None
