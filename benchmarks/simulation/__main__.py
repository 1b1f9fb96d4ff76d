"""Predictions of `disagg simulate` beside a real fleet: errors of TTFT and TPOT, by request.

The fleet, load and traces of `benchmarks.policy`: a router, two workers with a thread each, real
processes. `disagg calibrate` measures an engine alone. Then the fleet answers traces under some of
the router's rules, and is calibrated before and after each, as it runs. The simulated world
gets the same requests at the moments at which the real ones were sent, under the same rule and
roles, with the median of all calibrations in these roles, and a router that has planned the same
warm-up. A request's error is the distance of its predicted time from the measured one, as a share
of that. Every round asks the same, but for a token: how far equal requests are apart is what chance
leaves open.

Processes outnumber the cores here (router, two workers, client), so rates are low: a share of what
the fleet can do. A run is thrown away, said so and repeated a few times, where others took more
than a share of the machine, or where its calibrations differ; so are single requests left out:
what others took is not in the model.

    python -m benchmarks.simulation [--quick] [--mixes TEXT ...] [--record FILE]
    python -m benchmarks.simulation --again FILE

To reach: a median error of at most 10 % for TTFT and for TPOT, of every rule in every mix.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.policy.calibration import measure_capacity, warm_up
from benchmarks.policy.fleet import Fleet, System, running_fleet
from benchmarks.policy.traces import MIXES, VOCAB_SIZE, Mix, Request, make_trace
from benchmarks.serving.checkpoint import make_checkpoint
from benchmarks.simulation.figures import Pair, report
from benchmarks.simulation.machine_watch import wait_for_quiet
from benchmarks.simulation.measured import COLOCATED, RULES, WARM_UP, Calibrated, measure_engine
from benchmarks.simulation.predicted import curves_of, predict
from benchmarks.simulation.runs import (
    OTHERS_SHARE_MAX,
    Run,
    apart,
    disturbance,
    kept_run,
    of_round,
    read,
    write,
)
from disagg.commands.simulate import read_curves
from disagg.simulation.curves import Curves

SHARE = 0.2
WAIT_FOR_QUIET_S = 30.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        requests: of a run.
        rounds: of every rule and mix.
        engine_repeats: of every figure of the engine.
        repeats: of every figure of the fleet, before and after each run.
        tries_max: of a run, where it is thrown away.
        budget_s: since the begin; then nothing is repeated, nobody waits for quiet, and no round
            begins but the first, nor one that would last longer, if it lasts as long as the last.
    """

    requests: int = 20
    rounds: int = 2
    engine_repeats: int = 5
    repeats: int = 2
    tries_max: int = 2
    budget_s: float = 1_020.0


QUICK = Effort(requests=12, engine_repeats=3, repeats=3, tries_max=3, budget_s=300.0)


def main() -> None:
    """Calibrate, serve, predict, print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one mix, fewer requests")
    parser.add_argument("--mixes", nargs="+", default=[""], help="whose name has such a text")
    parser.add_argument("--record", type=Path, help="JSON file of all that was measured")
    parser.add_argument(
        "--again", type=Path, help="predict such a file's requests again; nothing is measured"
    )
    parser.add_argument(
        "--others-max",
        type=float,
        default=OTHERS_SHARE_MAX,
        help="share of the machine that others may take (default %(default)s); also with --again",
    )
    given = parser.parse_args()
    if given.again is not None:
        engine, runs = read(given.again)
    else:
        mixes = [mix for mix in MIXES if any(text in mix.name for text in given.mixes)]
        effort = QUICK if given.quick else Effort()
        session = Session(effort, mixes[:1] if given.quick else mixes, given.others_max)
        with tempfile.TemporaryDirectory(prefix="disagg-simulation-") as folder:
            engine, runs = session.measure(Path(folder), given.record)
    raise SystemExit(not all(compare(engine, runs, given.others_max)))


@dataclass(frozen=True, slots=True)
class Session:
    """What one call measures.

    Attributes:
        others_max: share of the machine that others may take during a run.
    """

    effort: Effort
    mixes: Sequence[Mix]
    others_max: float

    def measure(self, folder: Path, record: Path | None) -> tuple[Curves, list[Run]]:
        """The engine's curves, and what a real fleet did, thrown away or not."""
        effort, ends_s = self.effort, time.monotonic() + self.effort.budget_s
        checkpoint, out = folder / "checkpoint", folder / "curves.json"
        checkpoint.mkdir()
        make_checkpoint(checkpoint, VOCAB_SIZE, hidden_size=256, num_layers=6)
        runs: list[Run] = []
        with running_fleet(checkpoint, folder) as fleet:
            warm_up(fleet, WARM_UP)
            self._wait_for_quiet(fleet, ends_s)
            measure_engine(checkpoint, out, effort.engine_repeats)
            engine = read_curves(out)
            capacity = {mix.name: measure_capacity(fleet, COLOCATED, mix) for mix in self.mixes}
            calibrated = Calibrated(fleet, engine, effort.repeats, _say)
            for number in range(effort.rounds):
                began_s = time.monotonic()
                for rule in RULES[number % len(RULES) :] + RULES[: number % len(RULES)]:
                    for mix in self.mixes:  # the roles stay, and so does what was asked last
                        _say(f"round {number + 1} of {effort.rounds}: {mix.name}, {rule.policy}")
                        rate = SHARE * capacity[mix.name]
                        trace = of_round(make_trace(mix, rate, effort.requests, SEED), number)
                        runs += self._kept(calibrated, rule, mix, trace, ends_s)
                        if record is not None:
                            write(record, json.loads(out.read_text()), runs)
                left_s = ends_s - time.monotonic()
                if number + 1 < effort.rounds and time.monotonic() - began_s > left_s:
                    _say(f"no time is left for more than {number + 1} rounds")
                    break
        return engine, runs

    def _kept(
        self, calibrated: Calibrated, rule: System, mix: Mix, trace: list[Request], ends_s: float
    ) -> list[Run]:
        def measure(num_tries: int) -> Run:
            self._wait_for_quiet(calibrated.fleet, ends_s)
            if num_tries:  # what was measured after the last one was disturbed, too
                calibrated.forget()
            one = calibrated.run(rule, mix, trace)
            one = replace(one, thrown_away=disturbance(one, self.others_max))
            end = f"thrown away: {one.thrown_away}" if one.thrown_away else "kept"
            _say(f"{mix.name}, {rule.policy}: {len(trace)} requests, {end}")
            return one

        def may_retry(num_tries: int) -> bool:
            return num_tries < self.effort.tries_max and time.monotonic() < ends_s

        return kept_run(measure, may_retry)

    def _wait_for_quiet(self, fleet: Fleet, ends_s: float) -> None:
        if time.monotonic() > ends_s or self.others_max >= 1:
            return
        fleet.become(COLOCATED)  # nothing of ours goes on any more
        if not wait_for_quiet(self.others_max, WAIT_FOR_QUIET_S):
            _say(f"others take more than {self.others_max:.0%} of this machine")


def compare(engine: Curves, runs: Sequence[Run], others_max: float) -> list[bool]:
    """Print two figures of every rule and mix; returns for each whether its target was reached.

    Args:
        engine: its curves alone.
        runs: all of them; of those that were thrown away only the reasons are told.
        others_max: share of the machine; requests beside which others took more are left out.
    """
    done = []
    curves = curves_of(engine, runs)
    for mix, policy in dict.fromkeys((one.mix, one.policy) for one in runs):
        same = [
            (one, other)
            for one, other in zip(runs, curves, strict=True)
            if (one.mix, one.policy) == (mix, policy)
        ]
        done += _compare(f"{mix}, {policy}", same, others_max)
    return done


def _compare(name: str, runs: Sequence[tuple[Run, Curves]], others_max: float) -> list[bool]:
    first, between, num_disturbed, handed_over = [], [], 0, [0, 0]
    kept = [(run, curves) for run, curves in runs if not run.thrown_away]
    for run, curves in kept:
        rule = next(one for one in RULES if one.policy == run.policy)
        outcomes = predict(curves, rule, run.requests)
        for one, outcome in zip(run.requests, outcomes, strict=True):
            if one.others_share > others_max:
                num_disturbed += 1
                continue
            first.append(Pair(one.ttft_ms, outcome.ttft_ms))
            between.append(Pair(one.tpot_ms, outcome.tpot_ms))
            handed_over[0] += one.handed_over
            handed_over[1] += outcome.handed_over
    thrown = [one.thrown_away for one, _ in runs if one.thrown_away]
    share = median(one.others_share for one, _ in runs)
    why = f" ({'; '.join(thrown)})" if thrown else ""
    note = (
        f"{handed_over[0]} handed over, {handed_over[1]} predicted; {len(kept)} "
        f"runs, {len(thrown)} more thrown away{why}; others took {share:.0%} of the machine in the "
        f"median run; native engine, 2 workers with a thread each"
    )
    again = [run for run, _ in kept]
    return [
        report(f"{name}: TTFT", first, num_disturbed, apart(again, lambda one: one.ttft_ms), note),
        report(
            f"{name}: TPOT", between, num_disturbed, apart(again, lambda one: one.tpot_ms), note
        ),
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
