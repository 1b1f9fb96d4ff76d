"""A Ray head with the dashboard, as a RayCluster's, and what KubeRay's operator asks of it."""

import json
import os
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from disagg.cluster.processes import end_processes
from disagg.cluster.run_folder import RunFolder
from tests.process.program import ROOT, Program
from tests.process.replicas import free_port

BOUND_S = 900.0
POLL_S = 0.5
APPLICATION = "disagg"
PATH = "/api/serve/applications/"
RAYSERVICE = ROOT / "k8s/components/rayservice/rayservice.yaml"


def serve_config(config: Path, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The manifest's own ``serveConfigV2``, but for the place of the settings, and some of them."""
    manifest = yaml.safe_load(RAYSERVICE.read_text())
    found: dict[str, Any] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = found["applications"]
    application["args"] = {"config": str(config), "set": dict(given or {})}
    return found


class ServingRay:
    """One cluster of one host; all that it needs of this machine is its own.

    Attributes:
        name: of the cluster, which comes before its workers' ids.
        token: whoever has it may ask.
    """

    def __init__(self, name: str, cwd: Path) -> None:
        self.name = name
        self.token = secrets.token_hex(32)
        self._made = RunFolder()  # its path is short: sockets lie in it
        gcs_port, self._dashboard_port, self._agent_port = (free_port() for _ in range(3))
        self.program = Program(
            "ray.scripts.scripts",
            *("start", "--head", "--block", "--disable-usage-stats", "--num-cpus=0"),
            *("--node-ip-address=127.0.0.1", f"--port={gcs_port}"),
            *("--include-dashboard=true", f"--dashboard-port={self._dashboard_port}"),
            f"--dashboard-agent-listen-port={self._agent_port}",
            f"--ray-client-server-port={free_port()}",
            f"--object-store-memory={80 << 20}",
            '--resources={"disagg_prefill": 2, "disagg_decode": 2}',
            f"--temp-dir={self._made.path}",
            cwd=cwd,
            environment=os.environ
            | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.token,
                "RAY_worker_niceness": "0",
                "RAY_raylet_start_wait_time_s": "800",  # on a machine that is busy
                "RAY_USAGE_STATS_ENABLED": "0",
                "OMP_NUM_THREADS": "1",
                "UCX_NET_DEVICES": "lo",
                "DISAGG_CLUSTER__WORKER_ID_PREFIX": name,  # the manifest sets it so
            },
        )
        try:
            self.program.wait_for("Ray runtime started", BOUND_S)
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, body: object = None, *, token: str | None = None) -> tuple[int, str]:
        """Send the dashboard what the operator sends; status and text of the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard_port}{PATH}?api_type=declarative"
            if method == "GET"
            else f"http://127.0.0.1:{self._dashboard_port}{PATH}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "x-ray-authorization": f"Bearer {self.token if token is None else token}",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def deploy(self, config: Mapping[str, Any]) -> None:
        """As the operator does it, which tries again while the dashboard starts."""
        deadline = time.monotonic() + BOUND_S
        while True:
            try:
                status, text = self.ask("PUT", config)
            except OSError as error:
                status, text = 0, str(error)
            if status == 200:
                return
            assert status in (0, 503), text
            assert time.monotonic() < deadline, text
            time.sleep(POLL_S)

    def application(self) -> dict[str, Any]:
        """What the operator reads of it; empty when there is none."""
        status, text = self.ask("GET")
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)["applications"].get(APPLICATION, {})
        return found

    def wait_for(self, *statuses: str, bound_s: float = BOUND_S) -> dict[str, Any]:
        """The application, once it has one of these; "" is none any more."""
        deadline = time.monotonic() + bound_s
        while True:
            found = self.application()
            if found.get("status", "") in statuses:
                return found
            assert time.monotonic() < deadline, (found, self.logged()[-3000:])
            time.sleep(POLL_S)

    def raylet_health(self) -> str:
        """What the readiness probe of the manifest asks the agent."""
        url = f"http://127.0.0.1:{self._agent_port}/api/healthz"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return str(answer.read().decode())

    def logged(self) -> str:
        """What Serve's replica, its supervisor and the workers have said."""
        logs = sorted(self._made.path.glob("session_latest/logs/worker-*.err"))
        return "\n".join(one.read_text(errors="replace") for one in logs)

    def worker_pid(self, worker_id: str, epoch: str) -> int:
        """The process of one life of a worker, as its supervisor has found it."""
        found = re.search(
            rf"worker {worker_id} serves.*\(pid (\d+), epoch {epoch}\)", self.logged()
        )
        assert found is not None, self.logged()[-3000:]
        return int(found[1])

    def end(self) -> None:
        """End the cluster with all that runs there."""
        tree = self.program.tree()
        self.program.process.terminate()
        end_processes(tree, BOUND_S / 5)
        self._made.remove()
