"""Predictions of `disagg simulate` beside a real fleet: errors of TTFT and TPOT, by request.

The fleet, load and traces of `benchmarks.policy`: a router, two workers with a thread each, real
processes. While it is idle `disagg calibrate --fleet` measures the machine and the fleet. Then the
fleet answers traces under some of the router's rules; the simulated world gets the same requests at
the moments at which the real ones were sent, under the same rule and roles, with those curves. A
request's error is the distance of its predicted time from the measured one, as a share of that.

Processes outnumber the cores here (router, two workers, client), so rates are low: a share of what
the fleet can do. Requests while which others took more than a share of the machine are left out and
counted: what they took is not in the model.

    python -m benchmarks.simulation [--quick] [--mixes TEXT ...] [--record FILE]

To reach: a median error of at most 10 % for TTFT and for TPOT, of every rule in every mix.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.policy.__main__ import SYSTEMS
from benchmarks.policy.calibration import measure_capacity, warm_up
from benchmarks.policy.fleet import Fleet, System, running_fleet
from benchmarks.policy.traces import MIXES, VOCAB_SIZE, Mix
from benchmarks.serving.checkpoint import make_checkpoint
from benchmarks.simulation.figures import Pair, report
from benchmarks.simulation.machine_watch import wait_for_quiet
from benchmarks.simulation.measured import COLOCATED, OTHERS_SHARE_MAX, Seen, calibrate, serve
from benchmarks.simulation.predicted import predict
from disagg.commands.simulate import read_curves
from disagg.simulation.curves import Curves

POLICIES = ("prefix_then_load", "estimated")
QUICK_MIXES = MIXES[:1]
SHARE, REQUESTS, ROUNDS = 0.2, 20, 3
QUICK_REQUESTS, QUICK_ROUNDS = 12, 2
REPEATS, QUICK_REPEATS = 7, 5
WAIT_FOR_QUIET_S = 30.0
SEED = 1

Rounds = dict[tuple[str, System], list[list[Seen]]]
"""By the mix's name and the rule; a list for each round."""


def main() -> None:
    """Calibrate, serve, predict, print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one mix, fewer requests")
    parser.add_argument("--mixes", nargs="+", default=[""], help="whose name has such a text")
    parser.add_argument("--rounds", type=int, help=f"of every rule and mix (default {ROUNDS})")
    parser.add_argument("--record", type=Path, help="JSON of the curves and of all requests")
    given = parser.parse_args()
    mixes = [
        mix
        for mix in (QUICK_MIXES if given.quick else MIXES)
        if any(text in mix.name for text in given.mixes)
    ]
    num_rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    systems = [next(one for one in SYSTEMS if one.policy == policy) for policy in POLICIES]
    with tempfile.TemporaryDirectory(prefix="disagg-simulation-") as folder:
        curves, seen = measure(Path(folder), mixes, systems, num_rounds, quick=given.quick)
        if given.record is not None:
            write(given.record, Path(folder) / "curves.json", seen)
    done = [
        compare(f"{mix}, {system.policy}", curves, system, rounds)
        for (mix, system), rounds in seen.items()
    ]
    raise SystemExit(not all(done))


def measure(
    folder: Path, mixes: list[Mix], systems: list[System], num_rounds: int, *, quick: bool
) -> tuple[Curves, Rounds]:
    """What the machine is, and what a real fleet does on it."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    make_checkpoint(checkpoint, VOCAB_SIZE, hidden_size=256, num_layers=6)
    seen: Rounds = {}
    with running_fleet(checkpoint, folder) as fleet:
        warm_up(fleet, (COLOCATED, *systems))
        _wait_for_quiet(fleet)
        calibrate(checkpoint, fleet, folder / "curves.json", QUICK_REPEATS if quick else REPEATS)
        rates = {mix.name: SHARE * measure_capacity(fleet, COLOCATED, mix) for mix in mixes}
        for number in range(num_rounds):
            for mix in mixes:
                for place in range(len(systems)):
                    system = systems[(place + number) % len(systems)]
                    _wait_for_quiet(fleet)
                    num = QUICK_REQUESTS if quick else REQUESTS
                    one = serve(fleet, system, mix, rates[mix.name], num, SEED + number)
                    seen.setdefault((mix.name, system), []).append(one)
                    _say(
                        f"round {number + 1}: {mix.name}, {system.policy}: {rates[mix.name]:.2f}/s"
                    )
    return read_curves(folder / "curves.json"), seen


def compare(name: str, curves: Curves, system: System, rounds: list[list[Seen]]) -> bool:
    """Print the two figures of a rule and mix; returns whether both targets were reached."""
    first, between, num_disturbed, handed_over = [], [], 0, [0, 0]
    for seen in rounds:
        for one, outcome in zip(seen, predict(curves, system, seen), strict=True):
            if one.others_share > OTHERS_SHARE_MAX:
                num_disturbed += 1
                continue
            first.append(Pair(one.ttft_ms, outcome.ttft_ms))
            between.append(Pair(one.tpot_ms, outcome.tpot_ms))
            handed_over[0] += one.handed_over
            handed_over[1] += outcome.handed_over
    share = median(one.others_share for seen in rounds for one in seen)
    note = (
        f"{handed_over[0]} handed over, {handed_over[1]} predicted; others took {share:.0%} of the "
        f"machine in the median; native engine, 2 workers with a thread each"
    )
    done = [
        report(f"{name}: {what}", pairs, num_disturbed, note)
        for what, pairs in (("TTFT", first), ("TPOT", between))
    ]
    return all(done)


def write(path: Path, curves: Path, seen: Rounds) -> None:
    """Keep what was measured."""
    runs = [
        {"mix": mix, "policy": system.policy, "requests": [asdict(one) for one in requests]}
        for (mix, system), rounds in seen.items()
        for requests in rounds
    ]
    path.write_text(json.dumps({"curves": json.loads(curves.read_text()), "runs": runs}))


def _wait_for_quiet(fleet: Fleet) -> None:
    fleet.become(COLOCATED)  # nothing of ours goes on any more
    if not wait_for_quiet(OTHERS_SHARE_MAX, WAIT_FOR_QUIET_S):
        _say(f"others take more than {OTHERS_SHARE_MAX:.0%} of this machine")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
