"""`disagg serve`, `disagg router`, `disagg workers`: what runs until it is stopped."""

import logging
import time
from typing import Annotated

import typer
from rich.console import Console

from disagg.cluster.processes import end_with_parent
from disagg.commands.arguments import (
    Config,
    Decode,
    GrpcPort,
    Host,
    HttpPort,
    Model,
    Name,
    Prefill,
    RayAddress,
    Set,
    read_effective,
)
from disagg.commands.signals import exit_on_signals, hurry_on_signals, interrupt_on_signals
from disagg.config import router_options
from disagg.telemetry.log_format import configure_logging
from disagg.workers.router_discovery import FROM_CLUSTER


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
    Ctrl-C and SIGTERM stop everything and end it with exit code 0 (130 or 143 before it has begun).
    Requests that run may end first (router.drain_timeout_ms), unless a second signal comes.
    """
    exit_on_signals()  # until something is started
    effective = read_effective(
        config,
        settings_given,
        model=model,
        name=name,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        prefill=prefill,
        decode=decode,
        ray_address=ray_address,
    )
    from disagg.cluster.local import LocalCluster  # Ray takes a second to import

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cluster = LocalCluster(effective.settings, lambda line: console.print(line, markup=False))
    interrupt_on_signals()
    try:
        cluster.start()
        served = router_options(cluster.settings).model_name
        console.print(f"metrics and records are on {cluster.admin_url}", markup=False)
        console.print(f"serving {served} on {cluster.url}/v1 (Ctrl-C stops)", markup=False)
        try:
            while True:
                cluster.poll()
        except KeyboardInterrupt:
            console.print("stopping")
    except KeyboardInterrupt:
        pass  # while it started, which has reported it
    finally:
        hurry_on_signals(cluster.hurry)
        cluster.stop()
    if cluster.faults:
        raise typer.Exit(1)


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
    """Run the router alone: HTTP for clients, gRPC for workers.

    Ctrl-C and SIGTERM end it; requests that run may end first (router.drain_timeout_ms), unless a
    second signal comes.
    """
    exit_on_signals()  # until the router has its own
    if with_parent:
        end_with_parent()
    effective = read_effective(
        config,
        settings_given,
        model=model,
        name=name,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
    )
    from disagg.router.app import run

    _log_to_stderr(effective.settings.telemetry.log_format)
    options = router_options(effective.settings)
    announcement = None
    if FROM_CLUSTER in effective.settings.cluster.router_addresses:
        from disagg.cluster.router_directory import announce  # Ray takes a second to import

        announcement = announce(effective.settings)
        exit_on_signals()  # Ray has put its own in their place
    try:
        code = run(options)
    finally:
        if announcement is not None:
            announcement.withdraw()
    raise typer.Exit(code)


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

    They register with cluster.router_addresses; routers are started apart (disagg router).
    Without --ray-address the cluster this machine belongs to is joined. Ctrl-C and SIGTERM end it;
    what goes on may end first (worker.drain_timeout_ms), unless a second signal comes.
    """
    exit_on_signals()
    effective = read_effective(
        config,
        settings_given,
        model=model,
        name=name,
        prefill=prefill,
        decode=decode,
        ray_address=ray_address,
    )
    from disagg.cluster.ray_cluster import join_ray, stop_ray

    _log_to_stderr(effective.settings.telemetry.log_format)
    log = logging.getLogger("disagg")
    supervisor = None
    interrupt_on_signals()
    try:
        join_ray(effective.settings)
        from disagg.cluster.supervise import Supervisor  # imports Ray, see ray_cluster

        supervisor = Supervisor(effective.settings, log.info)
        supervisor.start()
        while True:
            supervisor.poll()
    except KeyboardInterrupt:
        log.info("stopping")
    finally:
        if supervisor is not None:
            hurry_on_signals(supervisor.hurry)
            supervisor.stop(drain=True)
        stop_ray()


def _log_to_stderr(log_format: str) -> None:
    logging.Formatter.converter = time.gmtime
    configure_logging(log_format, "%(asctime)sZ %(levelname)s %(name)s: %(message)s", {})
