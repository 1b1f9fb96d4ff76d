"""What workers report of their caches and transfers, added to the router's counters."""

from collections import Counter

from disagg.messages.reports import PrefillReport, TransferKind, TransferReport

VALUES_MAX = 64
OTHER = "other"


def count_report(
    counters: Counter[tuple[str, str]], report: PrefillReport | TransferReport
) -> None:
    """Add the tokens of a prefill, or the bytes of a hand-over or prefix pull."""
    if isinstance(report, PrefillReport):
        counters["prefill_tokens", "hit"] += report.hit_tokens
        counters["prefill_tokens", "pulled"] += report.pulled_tokens
        counters["prefill_tokens", "computed"] += report.computed_tokens
        counters["prefill_uncached_common_tokens", ""] += report.uncached_common_tokens
    elif report.kind is TransferKind.PREFIX:
        cause = report.failed.partition(":")[0] if report.failed else "committed"
        _add(counters, "prefix_pulls", cause, 1)
        for group in report.groups:
            _add(counters, "prefix_pulled_bytes", group.kind, group.pulled_bytes)
    else:
        for group in report.groups:
            _add(counters, "pulled_bytes", group.kind, group.pulled_bytes)
            _add(counters, "full_bytes", group.kind, group.full_bytes)


def _add(counters: Counter[tuple[str, str]], name: str, value: str, num: int) -> None:
    """Count under a value that a worker has named: the first so many have series of their own."""
    if (name, value) not in counters:
        num_values = sum(known == name for known, _ in counters)
        value = value if num_values < VALUES_MAX else OTHER
    counters[name, value] += num
