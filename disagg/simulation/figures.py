"""What a run comes to: percentiles, and goodput at SLOs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from disagg.simulation.world import Outcome

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slos:
    """What a request has to keep to count as goodput."""

    ttft_ms: float
    tpot_ms: float

    def kept_by(self, outcome: Outcome) -> bool:
        """Whether its answer came whole and in time."""
        if not outcome.finished or outcome.ttft_ms is None:
            return False
        tpot_ms = outcome.tpot_ms
        return outcome.ttft_ms <= self.ttft_ms and (tpot_ms is None or tpot_ms <= self.tpot_ms)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run.

    Attributes:
        policy: of the router.
        num_prefill: workers by role.
        num_decode: likewise.
        num_both: likewise.
        asked_rate: requests per second that were asked for.
        rate: that came, which chance and whole requests make another one.
        num_requests: that came.
        ttft_ms: percentiles by `PERCENTS`; None where no request had a first token.
        tpot_ms: likewise.
        goodput: requests per second that kept both SLOs.
        kept_share: the same as a share of those that came.
        handed_over_share: of those that were planned.
        cached_share: of all tokens of prompts.
        errors: requests without a whole answer, by code.
        reasons: what the first of each code was told.
        virtual_s: until the last one had ended.
    """

    policy: str
    num_prefill: int
    num_decode: int
    num_both: int
    asked_rate: float
    rate: float
    num_requests: int
    ttft_ms: tuple[float, ...] | None
    tpot_ms: tuple[float, ...] | None
    goodput: float
    kept_share: float
    handed_over_share: float
    cached_share: float
    errors: dict[str, int]
    reasons: dict[str, str]
    virtual_s: float

    def as_json(self) -> dict[str, Any]:
        """For programs; percentiles by name."""
        fields = asdict(self)
        for name in ("ttft_ms", "tpot_ms"):
            found = fields[name]
            if found is not None:
                fields[name] = {f"p{p}": v for p, v in zip(PERCENTS, found, strict=True)}
        return fields


def percentile(samples: Sequence[float], percent: float) -> float:
    """The least sample that ``percent`` of all do not exceed."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def summarise(
    outcomes: Sequence[Outcome],
    slos: Slos,
    *,
    policy: str,
    workers: tuple[int, int, int],
    asked_rate: float,
    lasts_s: float,
) -> Figures:
    """Sum a run up.

    Args:
        outcomes: of all its requests.
        slos: that count.
        policy: of the router.
        workers: by role: prefill, decode, both.
        asked_rate: requests per second.
        lasts_s: for so long requests came.
    """
    num_kept = sum(map(slos.kept_by, outcomes))
    first = [one.ttft_ms for one in outcomes if one.ttft_ms is not None]
    later = [one.tpot_ms for one in outcomes if one.finished and one.tpot_ms is not None]
    num_planned = sum(one.planned for one in outcomes)
    num_tokens = sum(one.request.num_prompt for one in outcomes)
    prefill, decode, both = workers
    return Figures(
        policy=policy,
        num_prefill=prefill,
        num_decode=decode,
        num_both=both,
        asked_rate=asked_rate,
        rate=len(outcomes) / lasts_s,
        num_requests=len(outcomes),
        ttft_ms=_percentiles(first),
        tpot_ms=_percentiles(later),
        goodput=num_kept / lasts_s,
        kept_share=num_kept / len(outcomes),
        handed_over_share=sum(one.handed_over for one in outcomes) / max(1, num_planned),
        cached_share=sum(one.num_cached for one in outcomes) / max(1, num_tokens),
        errors=dict(sorted(Counter(one.error for one in outcomes if one.error).items())),
        reasons={one.error: one.reason for one in reversed(outcomes) if one.error},
        virtual_s=max(one.end_ms or 0.0 for one in outcomes) / 1000,
    )


def _percentiles(samples: Sequence[float]) -> tuple[float, ...] | None:
    return tuple(percentile(samples, one) for one in PERCENTS) if samples else None
