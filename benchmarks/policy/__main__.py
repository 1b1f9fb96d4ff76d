"""Every rule of `router.policy` under the same requests: TTFT, TPOT, goodput at SLO.

Real processes: a router, two workers with a thread each, one model. They stay up; what changes is
the router's rule and the roles as which the workers register. Colocated (`local`) and `estimated`
have two workers of both roles; always hand over (`prefix_then_load`) and the rules of other systems
have one that prefills and one that decodes, as theirs do. Requests arrive by a Poisson process,
with the same tokens at the same moments for every rule; caches are emptied before each run; rules
alternate in rounds. Rates are shares of what two workers of both roles can do, a request's SLO is a
multiple of what its kind takes alone, both measured first; the router is told the SLOs. Every
answer is compared with the one that the other rules gave, and one with plain transformers.

    python -m benchmarks.policy [--quick] [--rounds N] [--seconds S] [--record FILE]
    python -m benchmarks.policy --curves FILE [--requests N]

With a file of `disagg calibrate` all of it happens in virtual time, in the world of `disagg
simulate`: the same figures in every run, whatever else the machine does, and as many requests as
wanted; rounds have other requests each.

To reach: goodput at least 0.95 of the best other rule's in every mix, and at least the best's where
kinds come together; no request's TTFT more than 2 times the least that another rule gave it.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.policy.calibration import measure_capacities, measure_slos, warm_up
from benchmarks.policy.figures import Cell, Round, Served, Slo, losses, report, table
from benchmarks.policy.fleet import Fleet, System, running_fleet
from benchmarks.policy.load import ask, play
from benchmarks.policy.systems import SYSTEMS
from benchmarks.policy.traces import MIXES, VOCAB_SIZE, make_trace
from benchmarks.policy.virtual import VirtualFleet
from benchmarks.serving.checkpoint import make_checkpoint
from benchmarks.serving.right_answer import NUM_CHECKED_TOKENS, right_answer
from disagg.commands.simulate import read_curves
from disagg.simulation.curves import Curves

SHARES, LASTS_S, ROUNDS = (0.4, 0.8), 6.0, 3
QUICK_SHARES = (0.6,)
REQUESTS_MIN, VIRTUAL_REQUESTS = 10, 40
SEED = 1


@dataclass
class Run:
    """What was measured so far; a file of it can be gone on with."""

    slos: dict[str, Slo]
    capacities: dict[str, float]
    seen: dict[Cell, dict[str, list[Round]]] = field(default_factory=dict)

    def cell(self, mix: str, share: float, lasts_s: float = LASTS_S) -> Cell:
        """A mix at a share of its capacity, for so many seconds."""
        rate = share * self.capacities[mix]
        return Cell(mix, share, rate, max(REQUESTS_MIN, round(rate * lasts_s)))

    def has(self, cell: Cell, system: str, number: int) -> bool:
        """Whether a system's round of this number, from 0, was measured."""
        return len(self.seen.get(cell, {}).get(system, ())) > number

    def add(self, cell: Cell, system: str, one: Round) -> None:
        """A round of a system."""
        self.seen.setdefault(cell, {}).setdefault(system, []).append(one)


def main() -> None:
    """Measure, print the figures, then the table on standard error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate, one round")
    parser.add_argument("--rounds", type=int, help=f"of all rules (default {ROUNDS})")
    parser.add_argument("--shares", type=float, nargs="+", help="of the capacity, as rates")
    parser.add_argument(
        "--seconds", type=float, help=f"of a round's requests (default {LASTS_S:g})"
    )
    parser.add_argument("--mixes", nargs="+", default=[""], help="whose name has such a text")
    parser.add_argument(
        "--record",
        type=Path,
        help="JSON lines of all requests; what a file that is there has is not measured again",
    )
    parser.add_argument("--curves", type=Path, help="of `disagg calibrate`: in virtual time")
    parser.add_argument(
        "--requests",
        type=int,
        default=VIRTUAL_REQUESTS,
        help="of every cell in virtual time (default %(default)s)",
    )
    given = parser.parse_args()
    if given.curves is not None and given.seconds is not None:
        parser.error("--seconds: of real processes; virtual rounds have --requests")
    num_rounds = given.rounds or (1 if given.quick else ROUNDS)
    shares = given.shares or (QUICK_SHARES if given.quick else SHARES)
    mixes = [mix for mix in MIXES if any(text in mix.name for text in given.mixes)]
    names = [mix.name for mix in mixes]
    about = "native engine, 2 workers with a thread each, medians of rounds"
    if given.curves is not None:
        about = "in virtual time, 2 workers, medians of rounds"
        curves = read_curves(given.curves)
        run = imagine(curves, num_rounds, shares, names, given.requests)
    else:
        with tempfile.TemporaryDirectory(prefix="disagg-policy-") as folder:
            lasts_s = given.seconds or LASTS_S
            run = measure(Path(folder), num_rounds, shares, names, given.record, lasts_s)
    mixed = {mix.name for mix in MIXES if mix.is_mixed}
    print(f"SLOs: {run.slos}", file=sys.stderr)
    print(table(run.seen.items(), run.slos), file=sys.stderr)
    print(losses(run.seen.items(), run.slos), file=sys.stderr)
    done = [
        report(cell, rounds, run.slos, is_mixed=cell.mix in mixed, note=about)
        for cell, rounds in run.seen.items()
    ]
    raise SystemExit(not all(done))


def measure(
    folder: Path,
    num_rounds: int,
    shares: Sequence[float],
    mixes: list[str],
    record: Path | None,
    lasts_s: float,
) -> Run:
    """Let every rule serve every cell in every round; ends the program at a wrong answer."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    make_checkpoint(checkpoint, VOCAB_SIZE, hidden_size=256, num_layers=6)
    asked = right_answer(checkpoint, VOCAB_SIZE)
    with running_fleet(checkpoint, folder) as fleet:
        warm_up(fleet, (SYSTEMS[1], SYSTEMS[0], SYSTEMS[-1]))
        answer = asyncio.run(ask(fleet.url, asked.prompt, NUM_CHECKED_TOKENS, "right"))
        if [f"t{token}" for token in answer.tokens] != asked.text.split():
            sys.exit(f"answers {answer.tokens} where plain transformers answers {asked.text!r}")
        run = read_record(record)
        if run is None:
            run = Run(measure_slos(fleet, SYSTEMS[0]), measure_capacities(fleet, SYSTEMS[0]))
            bounds = {kind: asdict(slo) for kind, slo in run.slos.items()}
            _write(record, {"slos": bounds, "capacities": run.capacities})
        _say(f"SLOs {run.slos}; capacities {run.capacities}")
        rights: dict[tuple[Cell, int], tuple[int, ...]] = {}
        for number in range(num_rounds):
            for mix in mixes:
                for share in shares:
                    cell = run.cell(mix, share, lasts_s)
                    # Who is first has the coldest machine: by turns.
                    for place in range(len(SYSTEMS)):
                        system = SYSTEMS[(place + number) % len(SYSTEMS)]
                        if run.has(cell, system.name, number):
                            continue
                        one, lines = _play(fleet, system, cell, run.slos, rights)
                        run.add(cell, system.name, one)
                        _write(record, *lines)
                        _say(f"round {number + 1}: {cell.name}: {system.name}")
                    _say(f"round {number + 1}: {cell.name} is done")
    return run


def imagine(
    curves: Curves, num_rounds: int, shares: Sequence[float], mixes: list[str], num_requests: int
) -> Run:
    """The same in virtual time: every cell of so many requests, others in every round."""
    fleet = VirtualFleet(curves)
    run = Run(fleet.slos(), {name: fleet.capacity(name) for name in mixes})
    _say(f"SLOs {run.slos}; capacities {run.capacities}")
    for mix in mixes:
        for share in shares:
            cell = Cell(mix, share, share * run.capacities[mix], num_requests)
            for number in range(num_rounds):
                for system in SYSTEMS:
                    run.add(cell, system.name, fleet.play(system, cell, run.slos, SEED + number))
                _say(f"round {number + 1}: {cell.name} is done")
    return run


def _play(
    fleet: Fleet,
    system: System,
    cell: Cell,
    slos: dict[str, Slo],
    rights: dict[tuple[Cell, int], tuple[int, ...]],
) -> tuple[Round, list[dict[str, Any]]]:
    mix = next(mix for mix in MIXES if mix.name == cell.mix)
    trace = make_trace(mix, cell.rate, cell.num_requests, SEED)
    fleet.become(system, min(slos[kind].tpot_ms for kind in {one.kind for one in trace}))
    name = f"{time.monotonic_ns()}"
    before_s, started_s = fleet.cpu_s(), time.monotonic()
    answers = asyncio.run(play(fleet.url, trace, name, slos))
    wall_s, cpu_s = time.monotonic() - started_s, fleet.cpu_s() - before_s
    served, lines = [], []
    for number, (request, answer) in enumerate(zip(trace, answers, strict=True)):
        if rights.setdefault((cell, number), answer.tokens) != answer.tokens:
            sys.exit(f"{system.name}, {cell.name}, request {number}: other tokens than before")
        plans = fleet.record(answer.request_id)["generations"]
        one = Served(request.kind, answer.ttft_ms, answer.tpot_ms, not plans[-1]["local"])
        served.append(one)
        lines.append(
            {
                "cell": asdict(cell),
                "system": system.name,
                "round": name,
                "number": number,
                "arrival_s": request.arrival_s,
                "sent_s": answer.sent_s - started_s,
                "input_length": answer.num_prompt_tokens,
                "output_length": request.num_output_tokens,
                "cpu_s": cpu_s,
                "wall_s": wall_s,
                "estimate": plans[0]["estimate"],
                "times": plans[0]["prefill_times"],
                "considered": plans[0]["considered"],
                **asdict(one),
            }
        )
    return Round(tuple(served), cpu_s, wall_s), lines


def read_record(path: Path | None) -> Run | None:
    """What an earlier run has measured; None where there is no file.

    A round that lacks requests, as the run was ended meanwhile, is left out.
    """
    if path is None or not path.exists():
        return None
    head, *lines = _whole_lines(path.read_text())
    run = Run({kind: Slo(**slo) for kind, slo in head["slos"].items()}, head["capacities"])
    rounds: dict[tuple[Cell, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if "cell" in line:
            key = Cell(**line["cell"]), line["system"], line["round"]
            rounds.setdefault(key, []).append(line)
    names = ("kind", "ttft_ms", "tpot_ms", "handed_over")
    for (cell, system, _), same in rounds.items():
        if len(same) == cell.num_requests:
            served = tuple(Served(**{name: one[name] for name in names}) for one in same)
            run.add(cell, system, Round(served, same[0]["cpu_s"], same[0]["wall_s"]))
    return run


def _whole_lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the program was ended while it wrote this
            yield json.loads(line)


def _write(path: Path | None, *lines: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:  # after a line that was cut off, on a line of its own
            file.writelines(["\n", *(json.dumps(line) + "\n" for line in lines)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
