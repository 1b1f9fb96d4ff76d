"""Figures of systems beside each other, and the rows of the README's table."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from benchmarks.interference.load import Seen, percentile
from benchmarks.transfer.figures import figure

METRICS = {
    "calm, ITL p50": "ms",
    "calm, ITL p99": "ms",
    "calm, tokens/s": "tokens/s",
    "ITL p50": "ms",
    "ITL p99": "ms",
    "ITL max": "ms",
    "tokens/s": "tokens/s",
    "TTFT of a short prompt, median": "ms",
    "TTFT of a short prompt, max": "ms",
    "TTFT of a long prompt, median": "ms",
    "TTFT of a long prompt, max": "ms",
    "CPU seconds of all processes": "s",
}
"""Of the running decodes where nothing else is said; the short prompts are theirs."""
COLUMNS = (
    "system",
    "calm: ITL p50 / p99 ms",
    "tokens/s",
    "disturbed: ITL p50 / p99 / max ms",
    "tokens/s",
    "TTFT of short prompts: median / max s",
    "TTFT of long prompts: median / max s",
    "CPU s",
)


class Measured:
    """Samples of one system, one of each metric per round."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)

    def add(self, calm: Seen, disturbed: Seen, cpu_s: float) -> None:
        """Add a round; the CPU seconds are those of the disturbed part."""
        values = [
            percentile(calm.gaps_ms, 50),
            percentile(calm.gaps_ms, 99),
            calm.tokens_per_s,
            percentile(disturbed.gaps_ms, 50),
            percentile(disturbed.gaps_ms, 99),
            max(disturbed.gaps_ms),
            disturbed.tokens_per_s,
            median(disturbed.first_ms),
            max(disturbed.first_ms),
            median(disturbed.long_first_ms),
            max(disturbed.long_first_ms),
            cpu_s,
        ]
        for name, value in zip(METRICS, values, strict=True):
            self.samples[name].append(value)

    def row(self, name: str) -> str:
        """The system's row of the table: medians of the rounds."""
        values = iter([median(self.samples[metric]) for metric in METRICS])

        def cell(num_values: int, divisor: float = 1.0, digits: int = 0) -> str:
            return " / ".join(f"{next(values) / divisor:,.{digits}f}" for _ in range(num_values))

        cells = [cell(2), cell(1), cell(3), cell(1), cell(2, 1e3, 1), cell(2, 1e3, 1), cell(1)]
        return f"| {' | '.join([name, *cells])} |"


def table(measured: Mapping[str, Measured]) -> str:
    """The table of the README."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *(one.row(name) for name, one in measured.items())])


def report(ours_name: str, peer_name: str, measured: Mapping[str, Measured], note: str) -> None:
    """Print the figures of one system beside another one; there are no targets."""
    ours, peer = measured[ours_name], measured[peer_name]
    for name, unit in METRICS.items():
        figure(
            f"{ours_name} beside {peer_name}: {name}",
            ours.samples[name],
            peer.samples[name],
            unit=unit,
            target=None,
            peer_name=peer_name,
            note=note,
            higher_is_better=unit == "tokens/s",
        )
