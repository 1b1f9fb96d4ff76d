"""Runs of a real fleet: what was seen, which of them say nothing, and a file of all."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.policy.traces import Request
from disagg.commands.fleet_requests import Asked
from disagg.commands.measured_fleet import Answers, AskShape, middle
from disagg.simulation.curves import Curves
from disagg.simulation.curves_file import curves_from_json

OTHERS_SHARE_MAX = 0.1
"""Of this machine's CPU time; more disturbs a request, and a run."""
BEGIN_TOKENS = 48
"""By which a prompt is known again in another round; every prompt is longer by more than rounds."""
DRIFT_MAX = 0.15
"""Between the calibrations before and after a run, in the median of all they measured."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request of a real fleet.

    Attributes:
        sent_s: since the run's begin.
        prompt: token ids.
        answer: likewise.
        others_share: of this machine's CPU time, between its arrival and its last token.
        compute_ms: what its prompt's steps took, as its worker says.
    """

    sent_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ttft_ms: float
    tpot_ms: float
    handed_over: bool
    others_share: float
    compute_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A trace under a rule, between two calibrations.

    Attributes:
        calibrations: what the fleet's requests took before and after it.
        others_share: of this machine's CPU time, from the first calibration to the last.
        thrown_away: why it says nothing of the model; "": it does.
    """

    mix: str
    policy: str
    requests: tuple[Seen, ...]
    calibrations: tuple[Answers, Answers]
    others_share: float
    thrown_away: str = ""


def disturbance(run: Run, share_max: float = OTHERS_SHARE_MAX) -> str:
    """Why a run says nothing of the model; "" where it does."""
    if run.others_share > share_max:
        return f"others took {run.others_share:.0%} of the machine"
    if (change := drift(*run.calibrations)) > DRIFT_MAX:
        return f"the calibrations before and after it are {change:.0%} apart"
    return ""


def drift(before: Answers, after: Answers) -> float:
    """How far two calibrations are apart: the median of all their figures, as a share."""
    found = []
    for shape, one in before.items():
        other = after[shape]
        found += [abs(other.ttft_ms / one.ttft_ms - 1), abs(other.tpot_ms / one.tpot_ms - 1)]
    return median(found)


def middle_answers(calibrations: Sequence[Answers]) -> Answers:
    """What requests of every shape took, in the median of calibrations of the same shapes."""
    return {
        shape: middle([one[shape] for one in calibrations if shape in one])
        for shape in calibrations[0]
    }


def of_round(trace: Sequence[Request], number: int) -> list[Request]:
    """The same requests for another round, each prompt shorter by as many tokens.

    An engine that has computed a length before is faster, and prompts of users have all lengths.
    """
    return [replace(one, tokens=one.tokens[: len(one.tokens) - number]) for one in trace]


def apart(runs: Sequence[Run], time_of: Callable[[Seen], float]) -> float | None:
    """How far the same requests are apart in other rounds: the median, as a share of the smaller.

    No prediction of requests by what they are can be much nearer to them than some 0.7 of that:
    what chance adds to each run is in it twice.

    Args:
        runs: of a rule and mix.
        time_of: that is compared.

    Returns:
        None where no request was asked twice, see `of_round`.
    """
    same: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    for run in runs:
        for number, one in enumerate(run.requests):
            same.setdefault((number, one.prompt[:BEGIN_TOKENS]), []).append(time_of(one))
    found = [
        max(pair) / min(pair) - 1
        for times in same.values()
        for pair in itertools.combinations(times, 2)
    ]
    return median(found) if found else None


def kept_run(measure: Callable[[int], Run], may_retry: Callable[[int], bool]) -> list[Run]:
    """Measure until a run is kept, or no more may be tried; all of them, in their order.

    Args:
        measure: a run, after so many that were thrown away.
        may_retry: whether there may be another one after so many.
    """
    found = [measure(0)]
    while found[-1].thrown_away and may_retry(len(found)):
        found.append(measure(len(found)))
    return found


def write(path: Path, engine: object, runs: Sequence[Run]) -> None:
    """Keep all that was measured, with what was thrown away.

    Args:
        path: of a JSON file.
        engine: the content of the file of curves, of the engine alone.
        runs: of all rules and mixes, in their order.
    """
    path.write_text(json.dumps({"engine": engine, "runs": [_to_json(one) for one in runs]}))


def read(path: Path) -> tuple[Curves, list[Run]]:
    """What `write` has written: the engine's curves, and the runs."""
    content = json.loads(path.read_text())
    return curves_from_json(content["engine"], str(path)), [
        _from_json(one) for one in content["runs"]
    ]


def _to_json(run: Run) -> dict[str, Any]:
    return {
        "mix": run.mix,
        "policy": run.policy,
        "others_share": run.others_share,
        "thrown_away": run.thrown_away,
        "calibrations": [
            [{"shape": asdict(shape), "asked": asdict(one)} for shape, one in answers.items()]
            for answers in run.calibrations
        ],
        "requests": [asdict(one) for one in run.requests],
    }


def _from_json(content: Mapping[str, Any]) -> Run:
    before, after = (
        {AskShape(**each["shape"]): Asked(**each["asked"]) for each in answers}
        for answers in content["calibrations"]
    )
    requests = tuple(
        Seen(**{**one, "prompt": tuple(one["prompt"]), "answer": tuple(one["answer"])})
        for one in content["requests"]
    )
    return Run(
        content["mix"],
        content["policy"],
        requests,
        (before, after),
        content["others_share"],
        content["thrown_away"],
    )
