"""The more workers there are, the less often each is asked to report."""

import pytest

from disagg.routing.report_pace import HEARTBEATS_PER_S, STATS_PER_S, report_pace
from tests.unit.routing.builders import Router, worker

SILENT_MS, BUSY_MS = 10_000, 1_500


@pytest.mark.parametrize("num_workers", [1, 2, 10, 25])
def test_few_workers_report_as_often_as_they_would(num_workers: int) -> None:
    pace = report_pace(num_workers, SILENT_MS, BUSY_MS)
    assert pace.heartbeat_ms <= 1_000, "a heartbeat's default"
    assert pace.stats_ms <= 100, "so often stats are looked at"


@pytest.mark.parametrize("num_workers", [50, 200, 250])
def test_all_together_report_no_more_than_so_often(num_workers: int) -> None:
    pace = report_pace(num_workers, SILENT_MS, BUSY_MS)
    assert 1000 * num_workers / pace.heartbeat_ms <= HEARTBEATS_PER_S
    assert 1000 * num_workers / pace.stats_ms <= STATS_PER_S


def test_nobody_is_asked_to_be_silent_for_so_long_that_it_is_taken_for_lost() -> None:
    for silent_ms, busy_ms in ((10_000, 1_500), (2_000, 500), (60_000, 60_000)):
        pace = report_pace(100_000, silent_ms, busy_ms)
        assert 0 < pace.heartbeat_ms <= silent_ms / 3
        assert 0 < pace.stats_ms <= min(2 * busy_ms / 3, 1_000)


def test_a_router_asks_by_the_workers_that_it_knows() -> None:
    router = Router(*(worker(f"w{number}") for number in range(200)), worker_silent_ms=SILENT_MS)
    assert router.core.report_pace == report_pace(200, SILENT_MS, SILENT_MS)
    router.core.session_lost(0, worker("w0").incarnation)
    assert router.core.report_pace.heartbeat_ms == 1000 * 199 // HEARTBEATS_PER_S
