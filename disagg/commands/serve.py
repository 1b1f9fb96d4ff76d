"""`disagg serve`, `disagg router`, `disagg workers`: what runs until it is stopped."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import yaml

from disagg.cluster.processes import end_with_parent, reap_orphans
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
from disagg.config import Settings, router_options
from disagg.errors import ConfigError, ExpiredError
from disagg.telemetry.log_format import configure_logging
from disagg.telemetry.log_stream import LogStream
from disagg.workers.router_discovery import FROM_CLUSTER

HURRIED_EXIT_CODE = 130
"""After a second signal, as of a router that runs alone."""
_POLL_S = 0.1
_AGAIN_S = 2.0
"""Far longer than from a signal to the beginning of the stop."""


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
    With it `disagg router` and `disagg workers` run beside that cluster; each is started again when
    it ends. SIGHUP reads the settings again: what they concern is started anew, nothing else. The
    workers stay when this ends (disagg workers --end).

    Ctrl-C and SIGTERM stop everything and end it with exit code 0 (130 or 143 before it has begun).
    Requests that run may end first (router.drain_timeout_ms), unless a second signal comes.
    """
    exit_on_signals()  # until something is started

    def read() -> Settings:
        return read_effective(
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
        ).settings

    settings = read()
    if settings.cluster.ray_address:
        _keep(settings, read)
    else:
        _serve_alone(settings)


def _serve_alone(settings: Settings) -> None:
    from disagg.cluster.local import LocalCluster  # Ray takes a second to import

    say = LogStream(sys.stderr).write_line
    cluster = LocalCluster(settings, say, before_stop=lambda one: hurry_on_signals(one.hurry))
    interrupt_on_signals(_AGAIN_S)
    try:
        cluster.start()
        served = router_options(cluster.settings).model_name
        say(f"metrics and records are on {cluster.admin_url}")
        say(f"serving {served} on {cluster.url}/v1 (Ctrl-C stops)")
        try:
            while True:
                cluster.poll()
                reap_orphans(cluster.child_pids)
        except KeyboardInterrupt:
            say("stopping")
    except KeyboardInterrupt:
        pass  # while it started, which has reported it
    finally:
        cluster.stop()
    if cluster.faults:
        raise typer.Exit(1)


def _keep(settings: Settings, read: Callable[[], Settings]) -> None:
    """Keep router and supervisor running; see `serve`."""
    from disagg.cluster.keep import Keeper

    asked = threading.Event()
    _log_to_stderr(settings.telemetry.log_format)
    log = logging.getLogger("disagg")
    keeper = Keeper(settings, log.info)
    interrupt_on_signals(_AGAIN_S)
    signal.signal(signal.SIGHUP, lambda number, frame: asked.set())
    try:
        keeper.start()
        while True:
            keeper.poll()
            if asked.is_set():
                asked.clear()
                try:
                    keeper.reload(read())
                except ConfigError as error:
                    log.error("the settings stay as they are: %s", error.message)
    except KeyboardInterrupt:
        log.info("stopping")
    finally:
        hurry_on_signals(keeper.hurry)
        keeper.stop()


def router(
    config: Config = None,
    model: Model = None,
    name: Name = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    settings_given: Set = None,
    parent: Annotated[int | None, typer.Option("--end-with-parent", hidden=True)] = None,
    inherited: Annotated[str, typer.Option("--inherited", hidden=True)] = "",
) -> None:
    """Run the router alone: HTTP for clients, gRPC for workers.

    Ctrl-C and SIGTERM end it; requests that run may end first (router.drain_timeout_ms), unless a
    second signal comes. With router.processes above 1 this starts so many routers on the same ports
    and starts again those that end.
    """
    exit_on_signals()  # until the router has its own
    if parent is not None:
        end_with_parent(parent)
    effective = read_effective(
        config,
        settings_given,
        model=model,
        name=name,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
    )
    _log_to_stderr(effective.settings.telemetry.log_format)
    if effective.settings.router.processes > 1 and not inherited:
        _route_in_processes(effective.settings)
        return
    from disagg.router.inherited import Inherited
    from disagg.router.process import run

    options = router_options(effective.settings)
    has = Inherited.from_text(inherited) if inherited else None
    announcement = None
    is_announced = has is None or has.number == 0  # one for all processes of an address
    if is_announced and FROM_CLUSTER in effective.settings.cluster.router_addresses:
        from disagg.cluster.announcing import Announcement

        announcement = Announcement(effective.settings)
    try:
        code = run(options, has)
    finally:
        if announcement is not None:
            announcement.withdraw()
    raise typer.Exit(code)


def _route_in_processes(settings: Settings) -> None:
    """Keep several router processes running, each with the same settings."""
    from disagg.cluster.own_settings import decide_ports
    from disagg.cluster.router_group import RouterGroup
    from disagg.cluster.run_folder import RunFolder

    log = logging.getLogger("disagg")
    router_options(settings)  # a bad checkpoint is reported before anything starts
    settings = decide_ports(settings)
    folder = RunFolder()
    file = folder.write("settings.yaml", yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "disagg.commands", "router", "--config", str(file)]
    group = RouterGroup(
        [*command, f"--end-with-parent={os.getpid()}"], settings, folder.path, log.info
    )
    interrupt_on_signals(_AGAIN_S)
    try:
        group.start()
        while not group.cannot_start:
            group.poll()
            time.sleep(_POLL_S)
        raise ConfigError("a router process cannot be started, its log says why")
    except KeyboardInterrupt:
        log.info("stopping %d router processes", settings.router.processes)
    finally:
        hurry_on_signals(group.hurry)
        try:
            drain_s = settings.router.drain_timeout_ms / 1000
            group.stop(drain_s + settings.cluster.stop_timeout_s)
        finally:
            folder.remove()
    if group.was_hurried:
        raise typer.Exit(HURRIED_EXIT_CODE)


def workers(
    config: Config = None,
    model: Model = None,
    name: Name = None,
    prefill: Prefill = None,
    decode: Decode = None,
    ray_address: RayAddress = None,
    settings_given: Set = None,
    end: Annotated[
        bool, typer.Option("--end", help="End the workers that run; what goes on may end first.")
    ] = False,
    end_here: Annotated[
        bool, typer.Option("--end-here", help="The same for those of this host alone, at once.")
    ] = False,
    parent: Annotated[int | None, typer.Option("--end-with-parent", hidden=True)] = None,
    report_file: Annotated[Path | None, typer.Option("--report-file", hidden=True)] = None,
) -> None:
    """Place the workers on a Ray cluster and keep them running.

    They register with cluster.router_addresses; routers are started apart (disagg router).
    Without --ray-address the cluster this machine belongs to is joined. Ctrl-C and SIGTERM end this
    command and not the workers: whoever runs it next finds them, and replaces one after the other
    whose settings have changed. --end ends them, and waits for worker.drain_timeout_ms at most.
    --end-here does so with every worker of this host, or pod, that may be signalled, without Ray;
    exit code 1: some still run.

    Where another process does the same for the cluster this one stands by, and takes over when that
    one ends or stands still. It ends with exit code 2 when the cluster has gone, 69 when there is
    none: it is to be run under something that starts it again.
    """
    exit_on_signals()
    if parent is not None:
        end_with_parent(parent)
    effective = read_effective(
        config,
        settings_given,
        model=model,
        name=name,
        prefill=prefill,
        decode=decode,
        ray_address=ray_address,
    )
    if end_here:
        _end_here(effective.settings)
        return
    from disagg.cluster.ray_cluster import stop_ray
    from disagg.cluster.ray_watch import RayWatch

    settings = effective.settings
    _log_to_stderr(settings.telemetry.log_format)
    # Twice: the first bound is the one with a message, and leaves time to look for hosts.
    watch = RayWatch()
    with watch.calls(2 * settings.cluster.join_timeout_s):
        interrupt_on_signals()
        try:
            _supervise(settings, watch.see, report_file, end=end)
        except KeyboardInterrupt:
            logging.getLogger("disagg").info("stopping, the workers stay")
        finally:
            stop_ray()


def _supervise(
    settings: Settings, see: Callable[[], None], report_file: Path | None, *, end: bool
) -> None:
    """Join the cluster, and keep its workers running, or end them; see `workers`."""
    from disagg.cluster.ray_cluster import join_ray
    from disagg.cluster.ray_watch import NO_CLUSTER_EXIT_CODE

    log = logging.getLogger("disagg")
    try:
        join_ray(settings.cluster.ray_address, settings.cluster.join_timeout_s)
        see()
    except ExpiredError as error:
        log.error("%s", error.message)
        raise typer.Exit(NO_CLUSTER_EXIT_CODE) from error
    from disagg.cluster.lasting import LastingSupervision  # imports Ray, see ray_cluster
    from disagg.cluster.supervise import Supervisor

    def tell(supervisor: Supervisor) -> None:
        if report_file is not None:
            supervisor.workforce.describe().write(report_file)

    supervision = LastingSupervision(settings, log.info)
    try:
        if end:  # within the drain's bound, or the watch's
            supervision.end_workers(see, lambda one: hurry_on_signals(one.hurry))
        else:
            supervision.run(see, tell)
    finally:
        supervision.end()


def _end_here(settings: Settings) -> None:
    from disagg.cluster.end_here import end_workers_here

    timeout_s = settings.worker.drain_timeout_ms / 1000 + settings.cluster.stop_timeout_s
    if left := end_workers_here(timeout_s):
        pids = ", ".join(str(worker.pid) for worker in sorted(left, key=lambda one: one.pid))
        print(f"disagg: workers still run after {timeout_s:g} s: pid {pids}", file=sys.stderr)
        raise typer.Exit(1)


def _log_to_stderr(log_format: str) -> None:
    logging.Formatter.converter = time.gmtime
    configure_logging(log_format, "%(asctime)sZ %(levelname)s %(name)s: %(message)s", {})
