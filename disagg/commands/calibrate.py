"""`disagg calibrate`: what steps, READs and messages take here, for `disagg simulate`."""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg.commands.arguments import Config, Model, Set, read_effective
from disagg.commands.fitted_fleet import fitted, with_serving
from disagg.commands.fleet_requests import Measured, RunningFleet, prompt_of
from disagg.commands.measured_fleet import (
    PROMPT_TOKENS,
    Workers,
    ask_fleet,
    ask_shapes,
    check_alike,
    check_roles,
)
from disagg.commands.new_file import check_writable, write_whole
from disagg.commands.signals import exit_on_signals
from disagg.config.options import model_name
from disagg.config.settings import Settings
from disagg.errors import ConfigError
from disagg.simulation.curves import NOTHING, Curves
from disagg.simulation.curves_file import curves_to_json

ERROR_MAX = 0.6
"""On a quiet machine steps are off by 0.02 to 0.1, READs by up to 0.42: memory's are no line."""
MEASUREMENTS = {
    "prefill": "steps of prompts",
    "decode": "steps that decode",
    "mixed": "steps of both",
    "read": "READs",
    "fleet": "the fleet's answers",
}
"""What a file of curves is made of, by the names of its errors; `linear` is of another form."""
LIBRARIES = ("disagg", "torch", "transformers", "nixl", "vllm")


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file that is written, JSON.")],
    model: Model = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Of every shape of step.")
    ] = 5,
    fleet: Annotated[
        str,
        typer.Option(
            "--fleet", help="HTTP of an idle fleet that runs (http://127.0.0.1:8000), asked too."
        ),
    ] = "",
    admin: Annotated[
        str,
        typer.Option(
            "--admin",
            help="Admin port of that fleet (http://127.0.0.1:8001): what its workers took to "
            "compute, and that it is idle.",
        ),
    ] = "",
    workers_per_host: Annotated[
        int,
        typer.Option(
            "--workers-per-host",
            min=1,
            max=1024,
            help="They divide the cores; with --fleet what they cost each other is measured.",
        ),
    ] = 1,
    error_max: Annotated[
        float,
        typer.Option(
            "--error-max",
            min=0.0,
            help="Curves are written if none of their parts is further off what was measured, as "
            "a share of it, in the median.",
        ),
    ] = ERROR_MAX,
    config: Config = None,
    settings_given: Set = None,
) -> None:
    """Measure a worker with these settings, and write its curves.

    Prefill steps by tokens and context, decode steps by batch and context, steps of both, READs by
    bytes between two processes on this machine, a message's way. With --fleet also what a fleet
    that runs adds, by requests of several lengths, alone and beside others: HTTP, the workers' own
    work, cores that are shared. It is left as it is, and does nothing else meanwhile; nor should
    this machine.

      disagg calibrate --model ./my-model --out c.json

      disagg simulate --curves c.json --mix short-chat --rate 1,2 --decode 3
    """
    exit_on_signals()
    if admin and not fleet:
        raise ConfigError("--admin: of which fleet? Give --fleet as well", param="--fleet")
    settings = read_effective(config, settings_given, model=model).settings
    name = model_name(settings)
    check_writable(out, "--out")
    running = RunningFleet(fleet, name, admin) if fleet else None
    if running is not None and settings.router.policy == "estimated":
        # Its plans are to be the same ones each time, and those of the simulation.
        running = replace(running, hand_over=True)
        rule = settings.router.model_copy(update={"policy": "prefix_then_load"})
        settings = settings.model_copy(update={"router": rule})
    workers: Workers = frozenset()
    fleet_tokens = 0
    if running is not None:  # what is wrong with it is known before minutes have gone by
        workers = running.wait_until_idle()
        check_roles(workers, settings)
        running.ask_at_once([prompt_of(PROMPT_TOKENS)])
        fleet_tokens = running.model_tokens()
    began_s = time.monotonic()

    def check(measured: Measured) -> None:
        check_alike(workers, measured)
        if fleet_tokens not in (0, measured.max_model_tokens):  # what is known without --admin
            raise ConfigError(
                f"scheduling.max_model_tokens: {fleet_tokens} at the fleet, "
                f"{measured.max_model_tokens} by the settings given here",
                param="scheduling.max_model_tokens",
            )

    curves, measured = _measure(settings, name, workers_per_host, repeats, check)
    check_errors(measured["errors"], error_max)
    if running is not None:
        check_roles(running.wait_until_idle(), settings)  # it may have changed since
        shapes = ask_shapes(curves, settings)
        answers = ask_fleet(shapes, running, repeats, _say)
        curves = with_serving(curves, settings, answers)
        measured["fleet"] = {"repeats": repeats, **fitted(curves, settings, answers)}
        measured["errors"]["fleet"] = _error(
            [
                one["simulated_ms"][name] / one["measured_ms"][name]
                for one in measured["fleet"]["requests"]
                for name in ("ttft_ms", "tpot_ms")
            ]
        )
        check_errors(measured["errors"], error_max)
    measured["took_s"] = round(time.monotonic() - began_s, 1)
    text = json.dumps(curves_to_json(curves, measured), indent=1)
    write_whole(out, f"{text}\n".encode(), "--out")
    _say(f"{out} after {measured['took_s']:g} s; errors of the fit: {measured['errors']}")


def _measure(
    settings: Settings,
    name: str,
    workers_per_host: int,
    repeats: int,
    check: Callable[[Measured], None],
) -> tuple[Curves, dict[str, Any]]:
    _say("imports")
    from disagg.commands.measured_links import measure_links  # with torch, which takes seconds
    from disagg.commands.measured_steps import StepRig, linear_fit
    from disagg.workers.engines.choice import build_engine
    from disagg.workers.limits import worker_limits
    from disagg.workers.options import WorkerOptions
    from disagg.workers.pool_region import PoolRegion

    options = WorkerOptions(
        worker_id="calibration",
        role="both",
        model_dir=str(Path(settings.model.dir).resolve()),
        model_name=name,
        router_addresses=(),
        workers_per_host=workers_per_host,
        **settings.worker.model_dump(exclude={"tiers"}),
        **settings.cache.model_dump(),
        **settings.scheduling.model_dump(),
        **settings.transfer.model_dump(),
    )
    load_before = os.getloadavg()[0]
    _say(f"{name} is loaded")
    engine = build_engine(options)
    tokens = min(options.max_model_tokens or engine.max_model_tokens, engine.max_model_tokens)
    limits = worker_limits(options, tokens, engine.layout.block_bytes)
    rig = StepRig(engine, limits, repeats, _say)
    region = engine.region
    check(
        Measured(
            engine.fingerprint,
            engine.dtype,
            engine.page_format,
            1 if isinstance(region, PoolRegion) else region.num_ranks,
            tuple(group.spec.block_tokens for group in engine.layout.groups),
            rig.served_tokens,
            limits.max_sequences,
        )
    )
    _say("to measure: prefill, decode, both in one step, READs, messages, then the fleet if any")
    rig.warm_up()
    prefill = rig.prefill_surface()
    decode, num_derived = rig.decode_surface()
    cost = linear_fit(rig.samples)
    mixed = rig.mixed_samples()
    device = "cuda" if isinstance(region, PoolRegion) and region.memory_kind == "VRAM" else "cpu"
    link, points, hop_ms = measure_links(
        engine.layout.block_bytes, device, options.read_handle_bytes_max, repeats, _say
    )
    curves = Curves(
        prefill=prefill,
        decode=decode,
        shared_ms=0.0,
        link=link,
        hop_ms=hop_ms,
        request=NOTHING,
        layout=engine.layout,
        num_blocks=region.num_blocks,
        max_model_tokens=tokens,
        name=f"{name} on {platform.node()}",
        workers_per_host=workers_per_host,
    )
    curves = curves.with_mixed([(one.shape, one.ms) for one in mixed])
    errors = {
        **{of: _error(ratios) for of, ratios in rig.ratios.items()},
        "mixed": _error([curves.step_ms(one.shape) / one.ms for one in mixed]),
        "read": _error([link.ms(num_bytes) / ms for num_bytes, ms in points]),
        "linear": _error([cost.shape_ms(one.shape) / one.ms for one in rig.samples]),
    }
    measured = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "node": platform.node(),
            "platform": platform.platform(),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": [load_before, os.getloadavg()[0]],
        },
        "versions": _versions(),
        "engine": engine.summary,
        "dtype": engine.dtype,
        "fingerprint": engine.fingerprint,
        "max_step_tokens": limits.max_step_tokens,
        "max_sequences": limits.max_sequences,
        "repeats": repeats,
        "num_steps": len(rig.samples),
        "num_derived_decode_points": num_derived,
        "mixed": [asdict(one.shape) | {"ms": one.ms} for one in mixed],
        "reads": [{"bytes": num_bytes, "ms": ms} for num_bytes, ms in points],
        "linear_fit": asdict(cost),
        "errors": errors,
    }
    return curves, measured


def check_errors(errors: Mapping[str, float | None], most: float) -> None:
    """Refuse curves that do not say what was measured.

    Args:
        errors: of the fit, by `MEASUREMENTS`.
        most: that none of them may exceed.

    Raises:
        ConfigError: names those that do.
    """
    bad = {MEASUREMENTS[of]: one for of, one in errors.items() if of in MEASUREMENTS and one}
    bad = {what: one for what, one in bad.items() if one > most}
    if not bad:
        return
    named = ", ".join(f"of {what} by {one:.0%}" for what, one in bad.items())
    load, cores = os.getloadavg()[0], os.cpu_count()
    raise ConfigError(
        f"no curves are written: they are off what was measured, in the median {named} "
        f"(--error-max: {most:.0%}). Calibrate where nothing else runs (the load average is "
        f"{load:.1f}, of {cores} cores), or with more --repeats; "
        f"--error-max {math.ceil(max(bad.values()) * 10) / 10:g} writes such curves all the same",
        param="--error-max",
    )


def _error(ratios: list[float]) -> float | None:
    """Median distance of what is computed from what was measured, as a share."""
    if not ratios:
        return None
    return round(statistics.median(abs(one - 1) for one in ratios), 4)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)
