"""The real side: a fleet's own curves, and what its requests took."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.policy.fleet import OPTIONS, WORKERS, Fleet, System
from benchmarks.policy.load import play
from benchmarks.policy.traces import Mix, make_trace, whole_prompts
from benchmarks.simulation.machine_watch import MachineWatch
from tests.process.harness import MODEL, SMALL

CALIBRATION_S = 900.0
OTHERS_SHARE_MAX = 0.1
"""Of this machine's CPU time; more disturbs a request."""
COLOCATED = System("colocated", "local", ("both", "both"))
SETTINGS = {
    "model.name": MODEL,
    "router.policy": COLOCATED.policy,
    "cluster.num_prefill": 0,
    "cluster.num_decode": 0,
    "cluster.num_both": len(WORKERS),
    **{f"worker.{name}": SMALL[name] for name in ("device", "dtype", "num_threads")},
    **{f"worker.{name}": OPTIONS[name] for name in ("num_blocks", "block_tokens")},
    **{
        f"scheduling.{name}": OPTIONS[name]
        for name in ("max_model_tokens", "max_step_tokens", "max_sequences")
    },
}
"""The fleet as it is calibrated, in the names of `disagg`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request of a real fleet.

    Attributes:
        sent_s: since the run's begin.
        prompt: token ids.
        answer: likewise.
        others_share: of this machine's CPU time, between its arrival and its last token.
    """

    sent_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ttft_ms: float
    tpot_ms: float
    handed_over: bool
    others_share: float


def settings_given() -> list[str]:
    """The texts of ``--set`` for the fleet's settings."""
    return [f"{name}={value}" for name, value in SETTINGS.items()]


def calibrate(checkpoint: Path, fleet: Fleet, out: Path, repeats: int) -> None:
    """Let `disagg calibrate` measure this machine and the idle fleet; ends the program if it fails.

    Args:
        checkpoint: that the fleet serves.
        fleet: whose workers all do both.
        out: the file of curves.
        repeats: of each figure.
    """
    fleet.become(COLOCATED)
    given = [word for text in settings_given() for word in ("--set", text)]
    program = [sys.executable, "-m", "disagg.commands", "calibrate"]
    options = ["--model", str(checkpoint), "--out", str(out), "--repeats", str(repeats)]
    run = subprocess.run(
        [*program, *options, "--fleet", fleet.url, *given],
        stdout=sys.stderr,
        timeout=CALIBRATION_S,
        check=False,
    )
    if run.returncode:
        sys.exit("disagg calibrate failed")


def serve(fleet: Fleet, system: System, mix: Mix, rate: float, num: int, seed: int) -> list[Seen]:
    """Ask the fleet a trace under a rule, beginning with empty caches."""
    fleet.become(system)
    trace = make_trace(mix, rate, num, seed)
    name, began_s = f"{time.monotonic_ns()}", time.monotonic()
    with MachineWatch(lambda: fleet.cpu_s() + sum(os.times()[:2])) as machine:
        answers = asyncio.run(play(fleet.url, trace, name))
    prompts = whole_prompts(trace, {number: one.tokens for number, one in enumerate(answers)})
    return [
        Seen(
            answer.sent_s - began_s,
            tuple(prompt),
            answer.tokens,
            answer.ttft_ms,
            answer.tpot_ms,
            not fleet.record(answer.request_id)["generations"][-1]["local"],
            machine.others_share(answer.sent_s, answer.last_s),
        )
        for answer, (_, prompt, _) in zip(answers, prompts, strict=True)
    ]
