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
        counters["prefix_pulls", _value(counters, "prefix_pulls", cause)] += 1
        for group in report.groups:
            counters[
                "prefix_pulled_bytes", _value(counters, "prefix_pulled_bytes", group.kind)
            ] += group.pulled_bytes
    else:
        for group in report.groups:
            counters["pulled_bytes", _value(counters, "pulled_bytes", group.kind)] += (
                group.pulled_bytes
            )
            counters["full_bytes", _value(counters, "full_bytes", group.kind)] += group.full_bytes


def _value(counters: Counter[tuple[str, str]], name: str, value: str) -> str:
    """A value that a worker has named: the first so many have series of their own."""
    if (name, value) in counters:
        return value
    return value if sum(known == name for known, _ in counters) < VALUES_MAX else OTHER
