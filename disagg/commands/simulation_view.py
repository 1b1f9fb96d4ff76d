"""What `disagg simulate` shows: the table, the best ratios, the plot."""

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from disagg.commands.new_file import check_writable, write_whole
from disagg.commands.table_console import table_console
from disagg.errors import ConfigError
from disagg.simulation.figures import PERCENTS, Figures
from disagg.simulation.fleet_plan import roles_name

SUFFIXES = (".svg", ".png")


def table(
    found: Sequence[Figures], best: Mapping[tuple[str, float], Figures], num_routers: int
) -> None:
    """Print a row for each run, and after them the best ratio of each policy and rate."""
    console = table_console()
    console.print(_rows(found, num_routers))
    reasons = {text: code for one in found for code, text in one.reasons.items() if text}
    for text, code in reasons.items():
        console.print(f"{code}: {text}", markup=False, soft_wrap=True)
    if best:
        console.print("Best ratio of prefill to decode workers, by policy and rate:")
        console.print(_rows(list(best.values()), num_routers))


def _rows(found: Sequence[Figures], num_routers: int) -> Table:
    shown = Table(box=None, header_style="bold")
    shown.add_column("policy")
    percents = "/".join(map(str, PERCENTS))
    for name in (
        "workers",
        "routers",
        "asked /s",
        "rate /s",
        "goodput /s",
        "kept",
        f"TTFT p{percents} ms",
        f"TPOT p{percents} ms",
        "handed over",
        "cached",
        "errors",
    ):
        shown.add_column(name, justify="right")
    for one in found:
        shown.add_row(
            one.policy,
            roles_name(one.num_prefill, one.num_decode, one.num_both),
            str(num_routers),
            f"{one.asked_rate:.4g}",
            f"{one.rate:.4g}",
            f"{one.goodput:.4g}",
            f"{one.kept_share:.1%}",
            _percentiles(one.ttft_ms, 0),
            _percentiles(one.tpot_ms, 1),
            f"{one.handed_over_share:.0%}",
            f"{one.cached_share:.0%}",
            ", ".join(f"{number} {code}" for code, number in one.errors.items()) or "-",
        )
    return shown


def _percentiles(figures: tuple[float, ...] | None, digits: int) -> str:
    return "-" if figures is None else " / ".join(f"{one:,.{digits}f}" for one in figures)


def check_plot(path: Path) -> None:
    """Refuse, before anything is simulated, what could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or the file's name or folder cannot be used.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot: {path}: .svg or .png is wanted", param="plot")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'disagg[plot]'", param="plot")
    check_writable(path, "--plot")


def plot(found: Sequence[Figures], path: Path, name: str) -> None:
    """Write goodput against rate: a line for each policy, at its best ratio where there are some.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl  # an extra
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    came = dict(sorted((one.asked_rate, one.rate) for one in found))
    axes.plot(list(came), list(came.values()), color="0.7", linestyle="--", label="all requests")
    for policy in dict.fromkeys(one.policy for one in found):
        best: dict[float, Figures] = {}
        for one in found:
            known = best.get(one.asked_rate)
            if one.policy == policy and (known is None or one.goodput > known.goodput):
                best[one.asked_rate] = one
        points = sorted(best)
        axes.plot(points, [best[rate].goodput for rate in points], marker="o", label=policy)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("goodput: requests per second within both SLOs")
    axes.set_title(name, fontsize="medium", parse_math=False)  # else by its dollar signs
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    axes.set_ylim(bottom=0)
    # Without a date and with fixed ids equal figures make equal files.
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    drawn = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "disagg", "svg.fonttype": "none"}):
        figure.savefig(drawn, format=kind, metadata=metadata)
    write_whole(path, drawn.getvalue(), "--plot")
