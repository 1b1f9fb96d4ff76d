"""Several runs of a comparison at once, in processes."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from disagg.commands import simulated_runs
from disagg.commands.simulated_runs import simulate_all
from disagg.simulation.comparison import Comparison, Trace
from disagg.simulation.figures import Slos
from disagg.simulation.mixes import Lengths, make_trace
from tests.unit.simulation.fleets import fleet


@dataclass
class Noted:
    """Makes requests, and writes down that it did, from whatever process."""

    path: Path

    def __call__(self, rate: float) -> Trace:
        with self.path.open("a") as notes:
            notes.write(f"{rate}\n")
        return make_trace("short-chat", rate, 4, Lengths(4_096, 0.1), 0), 4.0


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [open("/dev/full", "w"), closed(), None])  # noqa: SIM115
def test_progress_that_nobody_can_hear_loses_no_figures(
    monkeypatch: pytest.MonkeyPatch, stderr: TextIO | None
) -> None:
    monkeypatch.setattr(simulated_runs, "SAY_S", 0)
    monkeypatch.setattr(sys, "stderr", stderr)
    trace = make_trace("short-chat", 3, 4, Lengths(4_096, 0.1), 0)
    comparison = Comparison([fleet()], [3.0], lambda rate: (trace, 4.0), Slos(1_000, 100), 0)
    (found,) = simulate_all(comparison, 1, quiet=False)
    assert found.num_requests == len(trace)


def test_a_process_makes_a_rates_requests_once(tmp_path: Path) -> None:
    notes = tmp_path / "made"
    plans = [fleet().with_policy(name) for name in ("local", "prefix_then_load", "estimated")]
    comparison = Comparison(plans * 2, [3.0], Noted(notes), Slos(1_000, 100), 0)
    beside = simulate_all(comparison, 2, quiet=True)
    assert notes.read_text().split() in (["3.0"], ["3.0"] * 2)  # six runs, two processes
    assert beside == simulate_all(comparison, 1, quiet=True)
