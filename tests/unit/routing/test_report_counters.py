"""What workers report becomes series of the router's: so many values of a label, and no more."""

from collections import Counter

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.reports import GroupTransfer, TransferKind, TransferReport
from disagg.routing.report_counters import OTHER, VALUES_MAX, count_report

KEY, OWNER = RequestKey("r", 1), Incarnation("p", "e1")


def report(kind: str, failed: str = "") -> TransferReport:
    group = GroupTransfer(0, kind, 0, 16, "p", 1, 5, 5, 1, 5)
    which = TransferKind.PREFIX if failed else TransferKind.HANDOVER
    return TransferReport(KEY, OWNER, (group,), 0, 0, 0, which, 0, failed=failed)


def test_a_worker_cannot_make_series_without_end() -> None:
    counters: Counter[tuple[str, str]] = Counter()
    for number in range(3 * VALUES_MAX):
        count_report(counters, report(f"kind {number}"))
        count_report(counters, report("full_attention", f"cause {number}: why"))
    count_report(counters, report("kind 0"))
    for name in ("pulled_bytes", "prefix_pulls"):
        values = {value: num for (known, value), num in counters.items() if known == name}
        assert len(values) == VALUES_MAX + 1
        assert values[OTHER] == 2 * VALUES_MAX * (5 if name == "pulled_bytes" else 1)
    assert counters["pulled_bytes", "kind 0"] == 10
