"""Predictions beside what was measured: errors by request, as figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.policy.figures import GOODPUT_MIN
from benchmarks.transfer.figures import load
from disagg.simulation.figures import percentile

TARGET = 0.10
"""Median error over requests."""
KEPT_MIN = 5
"""Requests that nobody else disturbed; fewer say nothing."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A request as it went and as it was predicted; None: the prediction has no such time."""

    measured_ms: float
    predicted_ms: float | None

    @property
    def error(self) -> float:
        """Distance of the prediction, as a share of what was measured."""
        if self.predicted_ms is None:
            return 1.0
        return abs(self.predicted_ms / max(self.measured_ms, GOODPUT_MIN) - 1)


def report(
    name: str, pairs: Sequence[Pair], num_disturbed: int, apart: float | None, note: str
) -> bool:
    """Print a figure: the median error beside the target; returns whether it was reached.

    Args:
        name: of the figure.
        pairs: of all requests that count.
        num_disturbed: requests that do not.
        apart: how far the same requests are apart in other rounds, as a share; None: unknown.
        note: what else is known of them.
    """
    error = median(one.error for one in pairs) if pairs else None
    enough = len(pairs) >= KEPT_MIN
    # No error at all is as good as one of a hundredth of the target.
    ratio = None if error is None else round(TARGET / max(error, TARGET / 100), 3)
    ok = enough and ratio is not None and ratio >= 1
    line: Mapping[str, object] = {
        "name": name,
        "ours": None if error is None else round(error, 4),
        "peer": TARGET,
        "unit": "median relative error",
        "ratio": ratio,
        "target": 1.0,
        "ok": ok,
        "peer_name": "the bound",
        "rounds_apart": None if apart is None else round(apart, 4),
        "note": f"{_spread(pairs)}; {len(pairs)} requests, {num_disturbed} more disturbed by others"
        f"{'' if enough else ', too few to say anything'}; {note}; {load()}",
    }
    print(json.dumps(line), flush=True)
    return ok


def _spread(pairs: Sequence[Pair]) -> str:
    found = {
        "measured": [one.measured_ms for one in pairs],
        "predicted": [one.predicted_ms for one in pairs if one.predicted_ms is not None],
    }
    return ", ".join(
        f"{side} median {percentile(times, 50):.4g} ms, p99 {percentile(times, 99):.4g} ms"
        for side, times in found.items()
        if times
    )
