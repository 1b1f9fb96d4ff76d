"""What was seen of every request, and what is made of it: goodput, times, the table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.transfer.figures import figure

OURS, COLOCATED, ALWAYS = "estimated", "colocated", "always hand over"
GOODPUT_MIN = 1e-3
"""Stands for none at all where ratios are made."""
TTFT_RATIO_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request of a kind is to take at most."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A row: a mix at a rate.

    Attributes:
        share: of what two workers of both roles can do.
    """

    mix: str
    share: float
    rate: float
    num_requests: int

    @property
    def name(self) -> str:
        """Its name in the figures."""
        return f"{self.mix}, {self.share:g} of capacity"

    @property
    def lasts_s(self) -> float:
        """Time in which its requests arrive."""
        return self.num_requests / self.rate


@dataclass(frozen=True, slots=True)
class Served:
    """One request, served once."""

    kind: str
    ttft_ms: float
    tpot_ms: float
    handed_over: bool

    def keeps(self, slo: Slo) -> bool:
        """Whether it has kept both of its bounds."""
        return self.ttft_ms <= slo.ttft_ms and self.tpot_ms <= slo.tpot_ms


@dataclass(frozen=True, slots=True)
class Round:
    """A system's answers to all requests of a cell, in the order of their numbers."""

    served: tuple[Served, ...]
    cpu_s: float
    wall_s: float


Rounds = Mapping[str, Sequence[Round]]
"""Of one cell, by system."""


def goodput(one: Round, cell: Cell, slos: Mapping[str, Slo]) -> float:
    """Requests per second that kept the SLO of their kind."""
    return sum(served.keeps(slos[served.kind]) for served in one.served) / cell.lasts_s


def request_ttfts(rounds: Sequence[Round]) -> list[float]:
    """Of each request the median over the rounds."""
    return [median(one.ttft_ms for one in same) for same in zip(*_served(rounds), strict=True)]


def ttft_ratios(rounds: Rounds, name: str) -> list[float]:
    """Of each request: its TTFT in this system over the least that another system gave it.

    `OURS` is never the other one.
    """
    others = [request_ttfts(seen) for other, seen in rounds.items() if other not in (OURS, name)]
    best = [min(same) for same in zip(*others, strict=True)]
    pairs = zip(request_ttfts(rounds[name]), best, strict=True)
    return [ours / max(least, GOODPUT_MIN) for ours, least in pairs]


def best_other(cell: Cell, rounds: Rounds, slos: Mapping[str, Slo]) -> str:
    """The system with the largest goodput that is not ours; of equal ones the one of least TTFT."""

    def rank(name: str) -> tuple[float, float]:
        figures = [goodput(one, cell, slos) for one in rounds[name]]
        return -median(figures), median(_means(rounds[name], "ttft_ms"))

    return min((name for name in rounds if name != OURS), key=rank)


def report(
    cell: Cell, rounds: Rounds, slos: Mapping[str, Slo], *, is_mixed: bool, note: str
) -> bool:
    """Print a cell's figures; returns whether its targets were reached."""
    best = best_other(cell, rounds, slos)
    ours, peer = rounds[OURS], rounds[best]
    rates = [[max(GOODPUT_MIN, goodput(one, cell, slos)) for one in seen] for seen in (ours, peer)]
    about = f"{cell.num_requests} requests at {cell.rate:.2f}/s; {note}"
    ok = figure(
        f"{cell.name}: goodput at SLO",
        *rates,
        unit="requests/s",
        target=1.0 if is_mixed else 0.95,
        peer_name=f"best other rule: {best}",
        note=about,
        higher_is_better=True,
    )
    for what, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        samples = {system: _means(seen, name) for system, seen in rounds.items() if system != OURS}
        least = min(samples, key=lambda system: median(samples[system]))
        figure(
            f"{cell.name}: {what} mean",
            _means(ours, name),
            samples[least],
            unit="ms",
            target=None,
            peer_name=f"least of the others: {least}",
            note=about,
        )
    ratios = ttft_ratios(rounds, OURS)
    num_above = sum(one > TTFT_RATIO_MAX for one in ratios)
    worst = figure(
        f"{cell.name}: worst TTFT of a request, over the least that another rule gave it",
        [max(ratios)],
        [TTFT_RATIO_MAX],
        unit="x",
        target=1.0,
        peer_name="the bound",
        note=f"{num_above} of {len(ratios)} requests above it; of the other rules, each beside the "
        f"rest: {_above_of_others(rounds)}; medians of rounds; {about}",
    )
    return ok and worst


def table(cells: Iterable[tuple[Cell, Rounds]], slos: Mapping[str, Slo]) -> str:
    """The table of docs/benchmarks/policies.md; medians of rounds."""
    lines = [
        "| mix | system | goodput, requests/s | TTFT mean / p99 ms | TPOT mean / p99 ms"
        " | handed over | TTFT above 2x the least other's | CPU s |",
        "|---" * 8 + "|",
    ]
    for cell, rounds in cells:
        for name, seen in rounds.items():
            served = [one for answers in _served(seen) for one in answers]
            above = sum(one > TTFT_RATIO_MAX for one in ttft_ratios(rounds, name))
            lines.append(
                f"| {cell.name} | {name}"
                f" | {median(goodput(one, cell, slos) for one in seen):.2f} of {cell.rate:.2f}"
                f" | {_mean_and_p99([one.ttft_ms for one in served], 0)}"
                f" | {_mean_and_p99([one.tpot_ms for one in served], 1)}"
                f" | {mean(one.handed_over for one in served):.0%}"
                f" | {above} of {cell.num_requests}"
                f" | {median(one.cpu_s for one in seen):.1f} |"
            )
    return "\n".join(lines)


def losses(cells: Iterable[tuple[Cell, Rounds]], slos: Mapping[str, Slo]) -> str:
    """Where P/D loses: always hand over beside colocated, a line for each cell."""
    lines = [
        "| always hand over / colocated | goodput | TTFT mean | TPOT mean | P/D loses |",
        "|---" * 5 + "|",
    ]
    for cell, rounds in cells:
        both = rounds[ALWAYS], rounds[COLOCATED]
        kept = [median(goodput(one, cell, slos) for one in seen) for seen in both]
        ttft, tpot = (
            [median(_means(seen, f"{what}_ms")) for seen in both] for what in ("ttft", "tpot")
        )
        lost = ["goodput"] if kept[0] < kept[1] else []
        lost += [what for what, (pd, one) in (("TTFT", ttft), ("TPOT", tpot)) if pd > one]
        shown = " | ".join(f"{pd / max(one, GOODPUT_MIN):.2f}" for pd, one in (kept, ttft, tpot))
        lines.append(f"| {cell.name} | {shown} | {', '.join(lost) or 'nothing'} |")
    return "\n".join(lines)


def _above_of_others(rounds: Rounds) -> str:
    """How many requests of each other rule are above the same bound, where there are two rules."""
    others = [name for name in rounds if name != OURS]
    if len(others) < 2:
        return "none to compare"
    counts = {
        name: sum(one > TTFT_RATIO_MAX for one in ttft_ratios(rounds, name)) for name in others
    }
    return ", ".join(f"{name} {num}" for name, num in counts.items())


def _served(rounds: Sequence[Round]) -> list[tuple[Served, ...]]:
    return [one.served for one in rounds]


def _means(rounds: Sequence[Round], name: str) -> list[float]:
    return [mean(getattr(served, name) for served in one.served) for one in rounds]


def _mean_and_p99(samples: list[float], digits: int) -> str:
    samples = sorted(samples)
    p99 = samples[max(0, -(-len(samples) * 99 // 100) - 1)]
    return f"{mean(samples):.{digits}f} / {p99:.{digits}f}"
