"""Router and supervisor of workers beside a Ray cluster that exists, kept running."""

import os
import sys
import time
from collections.abc import Callable

import yaml

from disagg.cluster.counts import Counts
from disagg.cluster.hash_key import with_hash_key
from disagg.cluster.kept import Kept
from disagg.cluster.load_watch import read_key
from disagg.cluster.local import get
from disagg.cluster.own_settings import (
    CERTIFICATES,
    as_decided_before,
    decide_ports,
    with_certificates,
)
from disagg.cluster.router_group import RouterGroup
from disagg.cluster.run_folder import RunFolder
from disagg.config import (
    Settings,
    local_router_address,
    reachable_host,
    router_options,
    worker_options,
)
from disagg.errors import ConfigError, DisaggError, ExpiredError
from disagg.router.options import RouterOptions
from disagg.tls.authority import remove_keys

_POLL_S = 0.2
_READY_POLL_S = 1.0


class Keeper:
    """`disagg router` and `disagg workers` of one host. Not thread-safe.

    Each is started again when it ends, however it ends: a supervisor that has waited for the Ray
    cluster in vain too, while the router serves with the workers that are left. The workers
    themselves are Ray's: they go on when this, the router or the supervisor ends, and are found
    again.
    """

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._is_ready = False
        self._ask_at_s = 0.0
        self._folder = RunFolder()
        self._file = self._folder.path / "settings.yaml"
        command = [sys.executable, "-m", "disagg.commands"]
        end = ["--config", str(self._file), f"--end-with-parent={os.getpid()}"]
        self._route = [*command, "router", *end]
        self._routing: RouterOptions | None = None  # kept: what it was read from may have gone
        self._routers: RouterGroup | None = None
        self._workers = Kept("supervisor", [*command, "workers", *end], report)

    def start(self) -> None:
        """Start both.

        Raises:
            ConfigError: settings, checkpoint or ports cannot be used.
        """
        settings = with_hash_key(self._settings, os.environ, lasting=True)
        router_options(settings)
        settings = decide_ports(settings)
        self._settings = with_certificates(settings, self._folder.path, self._report)
        _check(self._settings)
        self._write(self._settings)
        self._routing = router_options(self._settings)
        self._routers = RouterGroup(self._route, self._settings, self._folder.path, self._report)
        self._routers.start()
        self._workers.start()

    def poll(self) -> None:
        """Look at both once."""
        if self._routers is not None:
            self._routers.poll()
        self._say_when_ready()
        self._workers.poll()
        time.sleep(_POLL_S)

    def reload(self, settings: Settings) -> None:
        """Go on with other settings.

        The supervisor is started anew, which finds its workers and replaces those whose settings
        have changed. Another router takes the place of the one that runs if its own have: it serves
        before that one refuses anything.

        Raises:
            ConfigError: settings or checkpoint cannot be used, or there is no room for them on the
                disk; nothing has changed then.
        """
        settings = with_hash_key(settings, os.environ, lasting=True)
        if settings.router.processes != self._settings.router.processes:
            self._report("router.processes stays as it is until all start anew")
        settings = as_decided_before(settings, self._settings)
        _check(settings)
        self._write(settings)
        routing, self._settings = router_options(settings), settings
        has_other_router, self._routing = routing != self._routing, routing
        try:
            self._workers.stop(settings.cluster.stop_timeout_s)
        except ExpiredError as error:  # it stood still; the next one takes over all the same
            self._report(error.message)
        self._workers.poll()
        if has_other_router and self._routers is not None:
            self._report("the router has new settings, another one takes its place")
            self._routers.replace(settings)

    def stop(self) -> None:
        """End both; requests that run may end first, workers stay."""
        for end in (self._stop_router, self._stop_workers):
            try:
                end()
            except DisaggError as error:
                self._report(error.message)
        remove_keys(self._folder.path / CERTIFICATES)
        self._folder.remove()

    def hurry(self) -> None:
        """Let nothing that runs end any more; for a signal handler, while `stop` runs."""
        if self._routers is not None:
            self._routers.hurry()

    def _stop_router(self) -> None:
        drain_s = self._settings.router.drain_timeout_ms / 1000
        if self._routers is not None:
            self._routers.stop(drain_s + self._settings.cluster.stop_timeout_s)

    def _stop_workers(self) -> None:
        self._workers.stop(self._settings.cluster.stop_timeout_s)

    def _say_when_ready(self) -> None:
        """Say once that requests can be served, whichever workers still start."""
        now_s = time.monotonic()
        if self._is_ready or now_s < self._ask_at_s:
            return
        self._ask_at_s = now_s + _READY_POLL_S
        router = self._settings.router
        host, _, _ = local_router_address(self._settings).rpartition(":")
        url = f"http://{host}:{router.http_port}"
        self._is_ready = get(url, "/ready")[0] == 200
        if self._is_ready:
            admin_url = f"http://{reachable_host(router.admin_host)}:{router.admin_port}"
            served = router_options(self._settings).model_name
            self._report(f"metrics and records are on {admin_url}")
            self._report(f"serving {served} on {url}/v1 (SIGTERM stops)")

    def _write(self, settings: Settings) -> None:
        """Leave settings for both, who read these or the last ones, whole.

        Raises:
            ConfigError: they cannot be written; the last ones stay.
        """
        fresh = self._file.with_suffix(".new")
        try:
            fresh.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
            fresh.replace(self._file)
        except OSError as error:
            raise ConfigError(f"{self._file}: {error.strerror}") from error


def _check(settings: Settings) -> None:
    """Do nothing with settings that router and supervisor can use.

    Raises:
        ConfigError: one of them would end at once.
    """
    router_options(settings)
    for role, count in Counts.of_settings(settings).by_role.items():
        if count:
            worker_options(settings, f"{role}-0", role)
    if settings.autoscale.ranges:
        read_key(settings.autoscale.api_key_file)
