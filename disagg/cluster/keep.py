"""Router and supervisor of workers beside a Ray cluster that exists, kept running."""

import os
import sys
import time
from collections.abc import Callable

import yaml

from disagg.cluster.back_off import BackOff
from disagg.cluster.child import Child
from disagg.cluster.hash_key import with_hash_key
from disagg.cluster.local import get
from disagg.cluster.own_settings import (
    CERTIFICATES,
    as_decided_before,
    decide_ports,
    with_certificates,
)
from disagg.cluster.run_folder import RunFolder
from disagg.config import Settings, local_router_address, reachable_host, router_options
from disagg.errors import DisaggError, ExpiredError
from disagg.tls.authority import remove_keys

NO_CLUSTER_EXIT_CODE = 69
"""Of a supervisor that has waited for the Ray cluster in vain."""
_POLL_S = 0.2
_READY_POLL_S = 1.0
_RUNS_AFTER_S = 5.0
"""A process that has run for so long has begun."""


class _Kept:
    """One process; it is started again when it ends, with growing delays."""

    def __init__(self, name: str, command: list[str], report: Callable[[str], None]) -> None:
        self._name = name
        self._command = command
        self._report = report
        self._back_off = BackOff()
        self._start_at_s = 0.0
        self._began_s = 0.0
        self.child: Child | None = None

    def start(self) -> None:
        self.child = Child(self._name, self._command, None)
        self._began_s = time.monotonic()

    def poll(self) -> int | None:
        """Start it again when it is time to; its exit code when it has just ended."""
        now_s = time.monotonic()
        if self.child is None:
            if now_s >= self._start_at_s:
                self.start()
            return None
        code = self.child.exit_code
        if code is None:
            if now_s - self._began_s >= _RUNS_AFTER_S:
                self._back_off.runs(now_s)
            return None
        delay_s = self._back_off.ended(now_s)
        self._report(f"{self._name} ended with exit code {code}; again in {delay_s:g} s")
        self.child, self._start_at_s = None, now_s + delay_s
        return code

    def stop(self, timeout_s: float) -> None:
        """End it, if it runs.

        Raises:
            ExpiredError: it had to be killed.
        """
        if self.child is not None:
            child, self.child = self.child, None
            child.stop(timeout_s)


class Keeper:
    """`disagg router` and `disagg workers` of one host. Not thread-safe.

    Each is started again when it ends, however it ends. The workers themselves are Ray's: they go
    on when this, the router or the supervisor ends, and are found again.
    """

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._is_ready = False
        self._ask_at_s = 0.0
        self._folder = RunFolder()
        self._file = self._folder.path / "settings.yaml"
        command = [sys.executable, "-m", "disagg.commands"]
        end = ["--config", str(self._file), "--end-with-parent"]
        self._router = _Kept("router", [*command, "router", *end], report)
        self._workers = _Kept("supervisor", [*command, "workers", *end], report)

    def start(self) -> None:
        """Start both.

        Raises:
            ConfigError: settings, checkpoint or ports cannot be used.
        """
        settings = with_hash_key(self._settings, os.environ, lasting=True)
        router_options(settings)
        settings = decide_ports(settings)
        self._settings = with_certificates(settings, self._folder.path, self._report)
        self._write()
        self._router.start()
        self._workers.start()

    def poll(self) -> None:
        """Look at both once.

        Raises:
            ExpiredError: there is no Ray cluster any more.
        """
        self._router.poll()
        self._say_when_ready()
        if self._workers.poll() == NO_CLUSTER_EXIT_CODE:
            raise ExpiredError("the Ray cluster has gone", param="cluster.ray_address")
        time.sleep(_POLL_S)

    def reload(self, settings: Settings) -> None:
        """Go on with other settings.

        The supervisor is started anew, which finds its workers and replaces those whose settings
        have changed. The router is started anew if its own have: requests that run may end first.

        Raises:
            ConfigError: settings or checkpoint cannot be used; nothing has changed then.
        """
        settings = with_hash_key(settings, os.environ, lasting=True)
        settings = as_decided_before(settings, self._settings)
        routing = router_options(settings)
        has_other_router = routing != router_options(self._settings)
        self._settings = settings
        self._write()
        self._workers.stop(settings.cluster.stop_timeout_s)
        self._workers.start()
        if has_other_router:
            self._report("the router has new settings, it starts anew")
            self._stop_router()
            self._router.start()

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
        if self._router.child is not None:
            self._router.child.hurry()

    def _stop_router(self) -> None:
        drain_s = self._settings.router.drain_timeout_ms / 1000
        self._router.stop(drain_s + self._settings.cluster.stop_timeout_s)

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

    def _write(self) -> None:
        self._file.write_text(yaml.safe_dump(self._settings.model_dump(mode="json")))
