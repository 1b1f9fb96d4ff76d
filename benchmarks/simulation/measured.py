"""The real side: an engine's curves, and requests to a fleet between two calibrations."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.policy.fleet import OPTIONS, WORKERS, Fleet, System
from benchmarks.policy.load import play
from benchmarks.policy.systems import SYSTEMS
from benchmarks.policy.traces import Mix, Request, whole_prompts
from benchmarks.simulation.machine_watch import MachineWatch
from benchmarks.simulation.runs import Run, Seen
from disagg.commands.arguments import read_effective
from disagg.commands.fleet_requests import RunningFleet
from disagg.commands.measured_fleet import Answers, ask_fleet, ask_shapes
from disagg.config.settings import Settings
from disagg.simulation.curves import Curves
from tests.process.harness import MODEL, SMALL

CALIBRATION_S = 900.0
ROLES = ("prefill", "decode", "both")
COLOCATED = System("colocated", "local", ("both", "both"))
POLICIES = ("prefix_then_load", "estimated")
RULES = tuple(next(one for one in SYSTEMS if one.policy == policy) for policy in POLICIES)
WARM_UP = (COLOCATED, *RULES)
"""Rules and roles with which the router has learned how fast its workers are, before any run."""
SETTINGS = {
    "model.name": MODEL,
    **{f"worker.{name}": SMALL[name] for name in ("device", "dtype", "num_threads")},
    **{f"worker.{name}": OPTIONS[name] for name in ("num_blocks", "block_tokens")},
    **{
        f"scheduling.{name}": OPTIONS[name]
        for name in ("max_model_tokens", "max_step_tokens", "max_sequences")
    },
}
"""The fleet, in the names of `disagg`."""


def calibrated_as(system: System) -> System:
    """The rule under which a fleet in these roles is calibrated: always the same plan."""
    return COLOCATED if system.roles == COLOCATED.roles else system


def settings_given(system: System = COLOCATED) -> list[str]:
    """The texts of ``--set`` for the fleet's settings in some roles."""
    roles = {f"cluster.num_{role}": system.roles.count(role) for role in ROLES}
    given = SETTINGS | roles | {"router.policy": system.policy}
    return [f"{name}={value}" for name, value in given.items()]


def fleet_settings(system: System = COLOCATED) -> Settings:
    """The fleet's settings in some roles."""
    return read_effective(None, settings_given(system)).settings


def measure_engine(checkpoint: Path, out: Path, repeats: int) -> None:
    """Let `disagg calibrate` measure an engine and links here; ends the program if it fails.

    Args:
        checkpoint: that the fleet serves.
        out: the file of curves.
        repeats: of each figure.
    """
    given = [word for text in settings_given() for word in ("--set", text)]
    program = [sys.executable, "-m", "disagg.commands", "calibrate"]
    options = ["--model", str(checkpoint), "--out", str(out), "--repeats", str(repeats)]
    run = subprocess.run(
        [*program, *options, "--workers-per-host", str(len(WORKERS)), *given],
        stdout=sys.stderr,
        timeout=CALIBRATION_S,
        check=False,
    )
    if run.returncode:
        sys.exit("disagg calibrate failed")


@dataclass(slots=True)
class Calibrated:
    """A fleet that is calibrated around each run, in the roles that it has in it.

    What comes after one is what comes before the next, where the roles stay.

    Args:
        fleet: stays up, and keeps what its router has learned.
        engine: curves of its engine alone.
        repeats: of each figure.
        say: told what goes on.
    """

    fleet: Fleet
    engine: Curves
    repeats: int
    say: Callable[[str], None]
    _last: tuple[System, Answers] | None = None
    _warm: set[System] = field(default_factory=set)

    def forget(self) -> None:
        """Other things went on since: calibrate anew."""
        self._last = None

    def run(self, system: System, mix: Mix, trace: list[Request]) -> Run:
        """Answer a trace between two calibrations."""
        with MachineWatch(lambda: self.fleet.cpu_s() + sum(os.times()[:2])) as machine:
            began_s = time.monotonic()
            rule = calibrated_as(system)
            last, self._last = self._last, None
            before = last[1] if last is not None and last[0] == rule else self._ask(rule)
            seen = serve(self.fleet, system, trace, machine)
            after = self._ask(rule)
            ended_s = time.monotonic()
        self._last = rule, after
        share = machine.others_share(began_s, ended_s)
        return Run(mix.name, system.policy, tuple(seen), (before, after), share)

    def _ask(self, rule: System) -> Answers:
        self.fleet.become(rule)
        running = RunningFleet(self.fleet.url, MODEL, self.fleet.admin_url)
        shapes = ask_shapes(self.engine, fleet_settings(rule))
        is_warm = rule in self._warm
        self._warm.add(rule)
        return ask_fleet(shapes, running, self.repeats, self.say, is_warm=is_warm)


def serve(fleet: Fleet, system: System, trace: list[Request], machine: MachineWatch) -> list[Seen]:
    """Ask the fleet a trace under a rule, beginning with empty caches."""
    fleet.become(system)
    name, began_s = f"{time.monotonic_ns()}", time.monotonic()
    answers = asyncio.run(play(fleet.url, trace, name))
    prompts = whole_prompts(trace, {number: one.tokens for number, one in enumerate(answers)})
    found = []
    for answer, (_, prompt, _) in zip(answers, prompts, strict=True):
        last = fleet.record(answer.request_id)["generations"][-1]
        found.append(
            Seen(
                answer.asked_s - began_s,
                tuple(prompt),
                answer.tokens,
                1e3 * (answer.first_s - answer.asked_s),
                answer.tpot_ms,
                not last["local"],
                machine.others_share(answer.asked_s, answer.last_s),
                (last["prefill_times"] or {}).get("compute_ms"),
            )
        )
    return found
