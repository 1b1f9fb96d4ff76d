"""How long a fleet that is not complete is waited for, and what is said of it then."""

import json
from pathlib import Path

from disagg.cluster.fleet_health import FleetHealth
from disagg.cluster.fleet_report import FleetReport

MISSING_MAX_S, SILENCE_MAX_S = 300.0, 100.0
NO_PLACE = "finds no place: it needs CPU 5 on one host"


def health() -> FleetHealth:
    return FleetHealth(MISSING_MAX_S, SILENCE_MAX_S, 0.0)


def report(num_serving: int, *missing: str, ended: tuple[str, ...] = ()) -> FleetReport:
    return FleetReport(num_serving, dict.fromkeys(missing, NO_PLACE), ended)


def see_until(one: FleetHealth, found: FleetReport | None, start_s: int, end_s: int) -> None:
    for now_s in range(start_s, end_s + 1):
        one.see(found, float(now_s))


def test_it_is_complete_when_nobody_is_missing() -> None:
    one = health()
    one.see(report(1, "decode-0"), 1.0)
    assert (one.is_complete, one.fault) == (False, "")
    one.see(report(2), 2.0)
    assert (one.is_complete, one.fault) == (True, "")


def test_who_is_missing_too_long_is_named_with_the_reason() -> None:
    one = health()
    see_until(one, report(1, "decode-0"), 1, 301)
    assert one.fault == ""
    one.see(report(1, "decode-0"), 302.0)
    assert one.fault == f"worker decode-0 does not serve: {NO_PLACE} (for 301 s)"
    one.see(report(2), 303.0)
    assert one.fault == ""


def test_each_worker_more_that_serves_renews_the_wait() -> None:
    one = health()
    see_until(one, report(0, "a-0", "b-0"), 1, 300)
    see_until(one, report(1, "b-0"), 301, 600)
    assert one.fault == ""
    see_until(one, report(1, "b-0"), 601, 602)
    assert "worker b-0 does not serve" in one.fault


def test_one_that_comes_and_goes_is_no_progress() -> None:
    one = health()
    for now_s in range(1, 400):
        one.see(report(1, "b-0") if now_s % 10 < 5 else report(0, "a-0", "b-0"), float(now_s))
    assert "b-0" in one.fault


def test_a_complete_fleet_that_loses_one_has_all_the_time_again() -> None:
    one = health()
    see_until(one, report(2), 1, 1000)
    see_until(one, report(1, "b-0"), 1001, 1301)
    assert one.fault == ""
    one.see(report(1, "b-0"), 1302.0)
    assert one.fault


def test_who_ends_again_and_again_is_waited_for_less() -> None:
    one = health()
    bad = report(1, "b-0", ended=("b-0",))
    see_until(one, bad, 1, 61)
    assert one.fault == ""
    see_until(one, report(1, "b-0"), 62, 62)  # its last life served: another reason
    see_until(one, bad, 63, 123)
    assert one.fault == ""
    one.see(bad, 124.0)
    assert one.fault == f"worker b-0 does not serve: {NO_PLACE} (again and again)"


def test_a_supervisor_that_says_nothing_is_named_with_its_end() -> None:
    one = health()
    one.see(report(2), 50.0)
    one.see_end("ended with exit code 2")
    see_until(one, None, 51, 150)
    assert one.fault == ""
    one.see(None, 151.0)
    assert one.fault == (
        "the supervisor of the workers says nothing for 101 s; it ended with exit code 2"
    )
    one.see(report(2), 152.0)
    assert one.fault == ""


def test_many_are_not_all_named() -> None:
    one = health()
    many = report(0, *(f"w-{number}" for number in range(20)))
    see_until(one, many, 0, 301)
    assert one.fault.count("does not serve") == 8
    assert "and 12 more" in one.fault


def test_a_report_is_read_as_it_was_written_and_only_its_writers(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert FleetReport.read(path, 1) is None
    written = report(1, "b-0", ended=("b-0",))
    written.write(path)
    pid = json.loads(path.read_text())["pid"]
    assert FleetReport.read(path, pid) == written
    assert FleetReport.read(path, pid + 1) is None
