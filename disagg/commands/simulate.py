"""`disagg simulate`: a fleet in virtual time, by policies, rates and ratios."""

import json
import sys
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from disagg.commands.arguments import SETTING_OF, Config, Decode, Prefill, Set, read_effective
from disagg.commands.signals import exit_on_signals
from disagg.commands.simulated_runs import PROCESSES_MAX, simulate_all
from disagg.commands.simulation_view import check_plot, plot, table
from disagg.config import Effective
from disagg.config.settings import Settings
from disagg.errors import ConfigError
from disagg.routing.policy.protocol import PolicyOptions
from disagg.routing.policy.registry import POLICIES
from disagg.routing.slo import Slo
from disagg.simulation.comparison import Comparison, best_ratio, splits
from disagg.simulation.curves import Curves
from disagg.simulation.curves_file import curves_from_json
from disagg.simulation.figures import Slos
from disagg.simulation.fleet_plan import FleetPlan, RouterPlan
from disagg.simulation.mixes import MIXES, Lengths, check_mix, make_trace
from disagg.simulation.prompts import TraceRequest, at_rate, own_rate
from disagg.simulation.trace_file import check_rate, lines_of, read_trace
from disagg.workers.cache_policy import cache_policy
from disagg.workers.limits import worker_limits
from disagg.workers.options import WorkerOptions

WORKERS_MAX = 4096
ROUTERS_MAX = 64
RATE_MAX = 1_000_000
"""Requests per second: more come of times that are in another unit."""
RATE_DOUBTED = 1_000
"""Of a trace by its own times: published ones have some ten per second, in seconds read as ms some
ten thousand."""
BLOCKS_MAX = 1 << 27
"""Of all pools together: each takes some 120 bytes here, and a kernel that has no more memory ends
the process without a word."""
CURVES_MAX = 1 << 26
"""Characters of their file; a checkpoint that is given by mistake would fill the memory."""
SECONDS, SCALE = 60.0, 1.0
"""Of a mix, where no others are given."""
POLICIES_COMPARED = "estimated,prefix_then_load,local"
SLOS = Slos(2_000, 100.0)
"""Where neither a flag nor a setting says others."""
NOT_SIMULATED = (
    "worker.tiers",
    "scheduling.num_speculative_tokens",
    "autoscale.prefill",
    "autoscale.decode",
    "autoscale.both",
)
"""Settings that, where they are set, let a fleet answer in another time than here."""


def simulate(
    curves: Annotated[Path, typer.Option("--curves", help="File of disagg calibrate.")],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Mooncake's JSONL; or give --mix.")
    ] = None,
    mix: Annotated[str, typer.Option("--mix", help=f"One of {', '.join(MIXES)}.")] = "",
    rate: Annotated[
        str,
        typer.Option("--rate", help="Requests per second, several as 1,2,4; a trace is stretched."),
    ] = "",
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=0.1,
            help="For so long requests of a mix come.",
            show_default=f"{SECONDS:g}",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale", min=0.001, max=100, help="Of a mix's lengths.", show_default=f"{SCALE:g}"
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="Several as a,b; all: every one there is.",
            show_default=f"{POLICIES_COMPARED}, and router.policy where it is set",
        ),
    ] = "",
    prefill: Prefill = None,
    decode: Decode = None,
    both: Annotated[
        int | None,
        typer.Option(
            "--both",
            help="Number of workers of both roles; there are no others then but those that are "
            "asked for.",
        ),
    ] = None,
    routers: Annotated[
        int | None,
        typer.Option(
            "--routers",
            min=1,
            max=ROUTERS_MAX,
            help="That share the requests, by turns, and know nothing of each other.",
            show_default="router.processes",
        ),
    ] = None,
    ratios: Annotated[
        bool,
        typer.Option("--ratios", help="Split the workers between the roles in several ways."),
    ] = False,
    slo_ttft_ms: Annotated[
        int | None,
        typer.Option(
            "--slo-ttft-ms",
            min=1,
            help="From arrival to first token, to count as goodput; as router.slo_ttft_ms.",
            show_default=f"{SLOS.ttft_ms:g}",
        ),
    ] = None,
    slo_tpot_ms: Annotated[
        float | None,
        typer.Option(
            "--slo-tpot-ms",
            min=0.1,
            help="Mean time per token after it; as router.slo_tpot_ms.",
            show_default=f"{SLOS.tpot_ms:g}",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all that is drawn.")] = 0,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            min=1,
            max=PROCESSES_MAX,
            help="Runs at once; each has a fleet of its own in memory. The figures are the same.",
        ),
    ] = 1,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Goodput against rate, as .svg or .png; needs the extra plot."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False,
    config: Config = None,
    settings_given: Set = None,
) -> None:
    """Simulate a fleet: goodput against rate by policy, and the best ratio of roles.

    The router's and the workers' own code decides; steps, READs and messages take the time that
    disagg calibrate measured. All requests of a rate are the same for every policy; the same seed
    brings the same figures. Workers and router have the settings of --config and --set.

      disagg simulate --curves c.json --mix shared-code --rate 5,10 --decode 4

      disagg simulate --curves c.json --trace t.jsonl --prefill 500 --json
    """
    exit_on_signals()
    if trace is not None and (seconds is not None or scale is not None):
        raise ConfigError(
            "--seconds, --scale: of a mix; a trace is simulated whole, as it is", param="trace"
        )
    if plot_file is not None:
        check_plot(plot_file)
    roles = {"prefill": prefill, "decode": decode, "both": both}
    slos_given = {"slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms}
    given = read_effective(config, settings_given, **roles, **slos_given)
    if both:
        for role in ("prefill", "decode"):
            if given.sources[SETTING_OF[role]] == "default":
                roles[role] = 0
        given = read_effective(config, settings_given, **roles, **slos_given)
    settings = given.settings
    left_out = not_simulated(settings)
    if left_out:  # with --quiet too: who reads the figures has to know
        print(f"disagg: not simulated, as if not set: {', '.join(left_out)}", file=sys.stderr)
    measured = read_curves(curves)
    slos = Slos(
        settings.router.slo_ttft_ms or SLOS.ttft_ms, settings.router.slo_tpot_ms or SLOS.tpot_ms
    )
    fleet = fleet_of(settings, measured, slos, routers or settings.router.processes)
    plans = [fleet.with_policy(name) for name in _policies(policy, given)]
    if ratios:
        plans = [plan.with_ratio(*split) for plan in plans for split in splits(len(fleet.roles))]
    lengths = Lengths(fleet.limits.max_model_tokens, SCALE if scale is None else scale)
    load = _Load(trace, mix, SECONDS if seconds is None else seconds, lengths, seed)
    rates = load.rates(rate)
    notes = [] if rate else load.notes()
    for note in notes:  # with --quiet too
        print(f"disagg: {note}", file=sys.stderr)
    comparison = Comparison(plans, rates, load.at, slos, seed)
    found = simulate_all(comparison, processes, quiet=quiet)
    best = best_ratio(found) if ratios else {}
    if as_json:
        whole = {
            "curves": measured.name,
            "slo_ttft_ms": slos.ttft_ms,
            "slo_tpot_ms": slos.tpot_ms,
            "seed": seed,
            "routers": fleet.router.num_routers,
            "not_simulated": left_out,
            "notes": notes,
            "runs": [one.as_json() for one in found],
            "best_ratios": [one.as_json() for one in best.values()],
        }
        print(json.dumps(whole, indent=2), flush=True)
    else:
        table(found, best, fleet.router.num_routers)
    if plot_file is not None:  # at the end: where it fails the figures have been shown
        plot(found, plot_file, measured.name)


def read_curves(path: Path) -> Curves:
    """What `disagg calibrate` wrote.

    Raises:
        ConfigError: the file is missing, or is none; names the field.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(CURVES_MAX + 1)
        if len(text) > CURVES_MAX:
            raise ConfigError(f"{path}: more than {CURVES_MAX:,} characters", param="curves")
        content = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="curves") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON: {error}", param="curves") from None
    return curves_from_json(content, str(path))


def not_simulated(settings: Settings) -> list[str]:
    """Names of the settings without which the fleet is simulated, though they are set."""
    return [name for name in NOT_SIMULATED if attrgetter(name)(settings)]


def fleet_of(settings: Settings, curves: Curves, slos: Slos, num_routers: int = 1) -> FleetPlan:
    """The fleet that these settings start, as far as it is simulated.

    However few routers there are, each takes as many requests as all workers run.

    Raises:
        ConfigError: there are too many workers or blocks, or no workers.
    """
    cluster, router, limits = settings.cluster, settings.router, settings.limits
    num_workers = cluster.num_prefill + cluster.num_decode + cluster.num_both
    if not 1 <= num_workers <= WORKERS_MAX:
        raise ConfigError(f"1 to {WORKERS_MAX} workers, not {num_workers}", param="cluster")
    options = WorkerOptions(
        worker_id="",
        role="both",
        model_dir="",
        model_name="",
        router_addresses=(),
        **settings.cache.model_dump(),
        **settings.scheduling.model_dump(),
        **settings.transfer.model_dump(),
    )
    if isinstance(settings.worker.num_blocks, int):
        curves = replace(curves, num_blocks=settings.worker.num_blocks)
    if num_workers * curves.num_blocks > BLOCKS_MAX:
        raise ConfigError(
            f"{num_workers} workers of {curves.num_blocks:,} blocks have more than the "
            f"{BLOCKS_MAX:,} that are simulated (worker.num_blocks)",
            param="worker.num_blocks",
        )
    tokens = min(options.max_model_tokens or curves.max_model_tokens, curves.max_model_tokens)
    policy = {one.name: getattr(router, one.name) for one in fields(PolicyOptions)}
    policy["slo_tpot_ms"] = policy["slo_tpot_ms"] or slos.tpot_ms
    return FleetPlan(
        curves=curves,
        limits=worker_limits(options, tokens, curves.layout.block_bytes),
        num_prefill=cluster.num_prefill,
        num_decode=cluster.num_decode,
        num_both=cluster.num_both,
        router=RouterPlan(
            router.policy,
            PolicyOptions(**policy),
            replans_max=router.replans_max,
            requests_max=max(limits.requests_max, num_workers * options.max_sequences),
            request_timeout_ms=router.request_timeout_ms,
            worker_prefill_tokens_max=limits.worker_prefill_tokens_max,
            worker_waiting_max=limits.worker_waiting_max,
            num_routers=num_routers,
        ),
        slo=Slo(int(slos.ttft_ms), slos.tpot_ms, router.slo_shed),
        cache=cache_policy(options),
        reserve_retry_ms=(options.reserve_retry_min_ms, options.reserve_retry_max_ms),
    )


def _policies(text: str, given: Effective) -> list[str]:
    if not text:
        text = POLICIES_COMPARED
        if given.sources["router.policy"] != "default":
            text += f",{given.settings.router.policy}"
    names = POLICIES if text == "all" else dict.fromkeys(one.strip() for one in text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(
                f"--policy: no policy is named {name!r}; known: {', '.join(POLICIES)}",
                param="policy",
            )
    return list(names)


def _read_trace(path: Path) -> list[TraceRequest]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return read_trace(lines_of(file), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="trace") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path}: no UTF-8 text. A compressed trace is to be unpacked first, "
            "as by gzip -dc FILE.gz > FILE",
            param="trace",
        ) from None


class _Load:
    """The trace that was given, or the mix."""

    def __init__(
        self, trace: Path | None, mix: str, seconds: float, lengths: Lengths, seed: int
    ) -> None:
        if (trace is None) == (not mix):
            raise ConfigError("give either --trace or --mix", param="trace")
        if mix and mix not in MIXES:
            raise ConfigError(
                f"--mix: no mix is named {mix!r}; known: {', '.join(MIXES)}", param="mix"
            )
        self._mix, self._seconds, self._lengths, self._seed = mix, seconds, lengths, seed
        self._requests: list[TraceRequest] = []
        if trace is not None:
            self._requests = _read_trace(trace)

    def rates(self, text: str) -> list[float]:
        """Those that were given; of a trace without any, its own."""
        if not text:
            if self._mix:
                raise ConfigError("--rate: requests per second of the mix", param="rate")
            own = own_rate(self._requests)
            if own > RATE_MAX:
                raise ConfigError(
                    f"timestamp: {own:,.0f} requests per second by the trace's own times, which "
                    f"are in ms; at most {RATE_MAX:,} are simulated, give --rate",
                    param="trace",
                )
            return [own]
        try:
            found = [float(one) for one in text.split(",")]
        except ValueError:
            raise ConfigError(f"--rate: numbers are wanted, not {text!r}", param="rate") from None
        if any(not 0 < one <= RATE_MAX for one in found):
            raise ConfigError(f"--rate: above 0, at most {RATE_MAX:,}", param="rate")
        found = list(dict.fromkeys(found))
        for one in found:  # not when its turn comes, after the runs of others
            if self._mix:
                check_mix(self._mix, one, self._seconds, self._lengths, self._seed)
            else:
                check_rate(self._requests, one)
        return found

    def notes(self) -> list[str]:
        """What is doubtful of a trace at its own rate."""
        if len(self._requests) < 2:
            return []
        if self._requests[0].at_ms == self._requests[-1].at_ms:
            return [
                f"all {len(self._requests):,} requests of the trace come at once: its rate, and "
                "goodput per second, mean nothing; a share of it that is kept does"
            ]
        own = own_rate(self._requests)
        if own < RATE_DOUBTED:
            return []
        return [
            f"timestamp: by its own times, read as ms, the trace has {own:,.0f} requests per "
            f"second in the mean; if they are seconds, give --rate {own / 1000:.4g}"
        ]

    def at(self, rate: float) -> tuple[list[TraceRequest], float]:
        """The requests at a rate, and for how many seconds they come."""
        if self._mix:
            made = make_trace(self._mix, rate, self._seconds, self._lengths, self._seed)
            return made, self._seconds
        return at_rate(self._requests, rate), len(self._requests) / rate
