"""Too much in quarantine: what goes on ends first, for a bounded time, then the process."""

from typing import Any

from disagg.messages.identity import Incarnation
from disagg.scheduling.actions import Exit
from disagg.scheduling.core import WorkerCore
from disagg.transfer.reader.table import InboundTable
from tests.unit.scheduling.test_inbound_admission import busy, reserve, steps, worker

DRAIN_MS = 500


class Quarantined(InboundTable):
    """READs that may still land hold everything."""

    @property
    def num_blocks_quarantined(self) -> int:
        return 1_000

    @property
    def peers_paused(self) -> frozenset[Incarnation]:
        return frozenset({Incarnation("p1", "7"), Incarnation("p0", "8")})


def stuck(core: WorkerCore) -> WorkerCore:
    core.inbound.__class__ = Quarantined
    assert not core.ready
    return core


def exits(core: WorkerCore, now_ms: int) -> bool:
    said = [action.reason for action in core.tick(now_ms) if isinstance(action, Exit)]
    assert all("they are from p0, p1:" in reason for reason in said)
    return bool(said)


def test_what_runs_may_end_first() -> None:
    core = stuck(busy(worker(drain_ms=DRAIN_MS)))
    assert not exits(core, 0)
    steps(core, 1)
    assert reserve(core).reason == "too many blocks are in quarantine"
    core.on_router_lost(10)  # nothing is left
    assert exits(core, 20)


def test_for_a_bounded_time() -> None:
    core = stuck(busy(worker(drain_ms=DRAIN_MS)))
    assert not exits(core, 0)
    assert not exits(core, DRAIN_MS - 1)
    assert exits(core, DRAIN_MS)


def test_a_read_that_ends_in_time_calls_it_off() -> None:
    core: Any = stuck(busy(worker(drain_ms=DRAIN_MS)))
    assert not exits(core, 0)
    core.inbound.__class__ = InboundTable
    assert core.ready
    assert not exits(core, 10 * DRAIN_MS)
    core.inbound.__class__ = Quarantined
    assert not exits(core, 10 * DRAIN_MS + 1), "the time begins anew"


def test_with_nothing_going_on_at_once() -> None:
    assert exits(stuck(worker(drain_ms=DRAIN_MS)), 0)
