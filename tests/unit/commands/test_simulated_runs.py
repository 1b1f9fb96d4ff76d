"""Several runs of a comparison at once, in processes."""

from dataclasses import dataclass
from pathlib import Path

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


def test_a_process_makes_a_rates_requests_once(tmp_path: Path) -> None:
    notes = tmp_path / "made"
    plans = [fleet().with_policy(name) for name in ("local", "prefix_then_load", "estimated")]
    comparison = Comparison(plans * 2, [3.0], Noted(notes), Slos(1_000, 100), 0)
    beside = simulate_all(comparison, 2, quiet=True)
    assert notes.read_text().split() in (["3.0"], ["3.0"] * 2)  # six runs, two processes
    assert beside == simulate_all(comparison, 1, quiet=True)
