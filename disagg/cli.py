"""The `disagg` command."""

import json
import logging
import os
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from disagg.cluster.processes import end_with_parent
from disagg.config import Effective, Settings, read_settings, router_options
from disagg.config.sources import Given, parse_text
from disagg.errors import ConfigError, DisaggError

USER_ERROR = 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Prefill/decode disaggregation for hybrid-attention language models.\n\n"
        "[bold]Examples[/bold]\n\n"
        "  disagg serve --model ./my-model\n\n"
        "  disagg serve --model ./my-model --prefill 2 --set worker.num_blocks=4096\n\n"
        "  disagg config --config disagg.yaml\n\n"
        "Settings come from --config, then DISAGG_SECTION__KEY variables, then flags."
    ),
)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file of settings (or DISAGG_CONFIG).")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Checkpoint directory.")]
Name = Annotated[str | None, typer.Option("--name", help="Name clients use.")]
Host = Annotated[str | None, typer.Option("--host", help="Address the router binds to.")]
HttpPort = Annotated[int | None, typer.Option("--http-port", help="0: any free one.")]
GrpcPort = Annotated[int | None, typer.Option("--grpc-port", help="0: any free one.")]
Prefill = Annotated[int | None, typer.Option("--prefill", help="Number of prefill workers.")]
Decode = Annotated[int | None, typer.Option("--decode", help="Number of decode workers.")]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", help='Ray cluster to join, e.g. "auto".')
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting.")
]


@app.command()
def serve(
    config: Config = None,
    model: Model = None,
    name: Name = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    prefill: Prefill = None,
    decode: Decode = None,
    ray_address: RayAddress = None,
    settings_given: Set = None,
) -> None:
    """Serve a model from this machine until Ctrl-C: Ray, workers and router.

    Without --ray-address a Ray cluster of this machine alone is started, and stopped at the end.
    """
    effective = _read(
        config,
        settings_given,
        {
            "model.dir": ("--model", model),
            "model.name": ("--name", name),
            "router.host": ("--host", host),
            "router.http_port": ("--http-port", http_port),
            "router.grpc_port": ("--grpc-port", grpc_port),
            "cluster.num_prefill": ("--prefill", prefill),
            "cluster.num_decode": ("--decode", decode),
            "cluster.ray_address": ("--ray-address", ray_address),
        },
    )
    from disagg.cluster.local import LocalCluster  # Ray takes a second to import

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cluster = LocalCluster(effective.settings, lambda line: console.print(line, markup=False))
    _interrupt_on_signals()
    try:
        cluster.start()
        _interrupt_on_signals()  # Ray has put its own in their place
        served = router_options(cluster.settings).model_name
        console.print(f"serving {served} on {cluster.url}/v1 (Ctrl-C stops)", markup=False)
        try:
            while True:
                cluster.poll()
        except KeyboardInterrupt:
            console.print("stopping")
    except KeyboardInterrupt:
        pass  # while it started, which has said so
    finally:
        _ignore_signals()
        cluster.stop()
    if cluster.faults:
        raise typer.Exit(1)


@app.command()
def router(
    config: Config = None,
    model: Model = None,
    name: Name = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    settings_given: Set = None,
    with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Run the router alone: HTTP for clients, gRPC for workers."""
    if with_parent:
        end_with_parent()
    effective = _read(
        config,
        settings_given,
        {
            "model.dir": ("--model", model),
            "model.name": ("--name", name),
            "router.host": ("--host", host),
            "router.http_port": ("--http-port", http_port),
            "router.grpc_port": ("--grpc-port", grpc_port),
        },
    )
    from disagg.router.app import run

    _log_to_stderr()
    raise typer.Exit(run(router_options(effective.settings)))


@app.command()
def workers(
    config: Config = None,
    model: Model = None,
    name: Name = None,
    prefill: Prefill = None,
    decode: Decode = None,
    ray_address: RayAddress = None,
    settings_given: Set = None,
) -> None:
    """Place the workers on a Ray cluster and keep them running.

    They register with cluster.router_addresses; the router is started apart (disagg router).
    Without --ray-address the cluster this machine belongs to is joined.
    """
    effective = _read(
        config,
        settings_given,
        {
            "model.dir": ("--model", model),
            "model.name": ("--name", name),
            "cluster.num_prefill": ("--prefill", prefill),
            "cluster.num_decode": ("--decode", decode),
            "cluster.ray_address": ("--ray-address", ray_address),
        },
    )
    from disagg.cluster.ray_cluster import join_ray, stop_ray

    _log_to_stderr()
    log = logging.getLogger("disagg")
    supervisor = None
    _interrupt_on_signals()
    try:
        join_ray(effective.settings)
        _interrupt_on_signals()
        from disagg.cluster.supervise import Supervisor  # imports Ray, see ray_cluster

        supervisor = Supervisor(effective.settings, log.info)
        supervisor.start()
        while True:
            supervisor.poll()
    except KeyboardInterrupt:
        log.info("stopping")
    finally:
        _ignore_signals()
        if supervisor is not None:
            supervisor.stop()
        stop_ray()


@app.command("config")
def show_config(
    config: Config = None,
    settings_given: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print every setting, its value and where it came from."""
    rows = _rows(_read(config, settings_given, {}))
    if as_json:
        values = {key: {"value": value, "source": source} for key, value, source in rows}
        print(json.dumps(values, indent=2))
        return
    table = Table("setting", "value", "from", box=None)
    for key, value, source in rows:
        style = "dim" if source == "default" else "bold"
        table.add_row(key, json.dumps(value), source, style=style)
    width = None if sys.stdout.isatty() else 200  # a pipe has no width to fold lines to
    Console(width=width).print(table)


@app.command()
def leases(
    router_url: Annotated[
        str, typer.Option("--router", help="HTTP address of a router.")
    ] = "http://127.0.0.1:8000",
    watch: Annotated[bool, typer.Option("--watch", help="Every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=60, help="Seconds to wait for answers.")
    ] = 3.0,
) -> None:
    """Show leases, inbound transfers, reservations and quarantine of every worker.

    The exit code is 1 when a worker does not answer, 2 when no router does.
    """
    from disagg.cluster.leases_table import show_leases

    if watch:
        _interrupt_on_signals()
    raise typer.Exit(show_leases(router_url, as_text=not as_json, watch=watch, timeout_s=timeout_s))


@app.command("plan")
def plan_kv_memory(
    model: Annotated[Path, typer.Option("--model", "-m", help="Directory with a config.json.")],
    memory: Annotated[str, typer.Option("--memory", help="KV budget of a worker, e.g. 64GiB.")],
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sequence; default: the longest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print how a model's KV cache fits into a memory budget."""
    from disagg.config.memory_table import MemoryReport

    report = MemoryReport(model, memory, context)
    if as_json:
        print(report.as_json())
        return
    width = None if sys.stdout.isatty() else 200  # a pipe has no width to fold lines to
    report.print_to(Console(width=width, highlight=False))


@app.command()
def explore(
    full: Annotated[bool, typer.Option("--full", help="The large worlds too (minutes).")] = False,
    world: Annotated[
        list[str] | None, typer.Option("--world", metavar="NAME", help="This world only.")
    ] = None,
) -> None:
    """Exhaust everything that can happen to a transfer in small worlds, or print what breaks."""
    from disagg.cluster.explore import explore_worlds

    raise typer.Exit(explore_worlds(full, world or [], lambda line: print(line, flush=True)))


def main() -> None:
    """Entry point: user errors become one clear text and exit code 2."""
    try:
        app()
    except DisaggError as error:
        print(f"disagg: {error.message}", file=sys.stderr)
        sys.exit(USER_ERROR)


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if show_version:
        print(version("disagg"))
        raise typer.Exit()


def _read(
    config: Path | None, given: list[str] | None, flags: dict[str, tuple[str, object]]
) -> Effective:
    values = {k: Given(v, f"flag:{flag}") for k, (flag, v) in flags.items() if v is not None}
    for text in given or ():
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {text}: expected SECTION.KEY=VALUE", param="--set")
        values[key] = Given(parse_text(key, value), f"flag:--set {key}")
    return read_settings(config, os.environ, values)


def _rows(effective: Effective) -> list[tuple[str, Any, str]]:
    rows: list[tuple[str, Any, str]] = []
    for section, values in effective.settings.model_dump(mode="json").items():
        for key, value in values.items():
            dotted = f"{section}.{key}"
            hidden = dotted in Settings.secrets() and value
            rows.append((dotted, "***" if hidden else value, effective.sources[dotted]))
    return rows


def _log_to_stderr() -> None:
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)sZ %(levelname)s %(name)s: %(message)s",
    )


def _interrupt_on_signals() -> None:
    """SIGTERM and SIGINT both end the main thread's wait, wherever it is."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def _ignore_signals() -> None:
    """Stopping is bounded and must not be cut short, or processes would stay behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    main()
