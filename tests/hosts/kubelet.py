"""Runs a pod on a host of namespaces, as a kubelet would: containers, preStop hook, restarts."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.cluster.processes import ProcessId, find_children
from tests.hosts.hosts import Host

Manifest = dict[str, Any]

BOUND_S = 300.0
FIELD = re.compile(r"metadata\.labels\['(.+)'\]")
REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
PREPARE = """
cp -a /etc /mnt/etc
mount --bind /mnt/etc /etc
mkdir -p /tmp/ray /run/secrets/kubernetes.io/serviceaccount
"""
"""A container's own `/etc`, in which volumes can be mounted."""


class Pod:
    """A pod on its host.

    Attributes:
        hook_said: exit code and words of every preStop hook, by container, once it is ended.
    """

    def __init__(
        self,
        pod: Manifest,
        host: Host,
        volumes: Mapping[str, Mapping[str, bytes]],
        secrets: Mapping[str, Mapping[str, bytes]],
        environment: Mapping[str, str],
        logs: Path,
    ) -> None:
        """Describe it; `start` starts it.

        Args:
            pod: as the API has it.
            host: that runs nothing else.
            volumes: files by name, by the path at which containers find them.
            secrets: values by key, by name.
            environment: what the image and the kubelet give every container.
            logs: the folder for what containers say.
        """
        self.name: str = pod["metadata"]["name"]
        self.host = host
        self.hook_said: dict[str, tuple[int, str]] = {}
        self._pod = pod
        self._volumes = volumes
        self._secrets = secrets
        self._environment = environment
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._before: set[ProcessId] = set()
        self._started = False

    def start(self) -> None:
        """Write what its volumes hold, run the first containers to their ends, start the others.

        Raises:
            AssertionError: one of the first failed.
        """
        self.host.run(PREPARE)
        for folder, files in self._volumes.items():
            self.host.run(f"mkdir -p {folder}")
            for name, data in files.items():
                self._write(f"{folder}/{name}", data)
        self._before = self.host.processes
        for container in self._pod["spec"].get("initContainers", []):
            self._start(container)
            first = self._running.pop(container["name"])
            assert first.wait(BOUND_S) == 0, self.log_of(container["name"])
        for container in self._containers:
            self._start(container)
        self._started = True

    @property
    def runs_ray(self) -> bool:
        """Whether its Ray node has joined, or will never."""
        ray = self._containers[0]["name"]
        done = ray in self._running and self._running[ray].poll() is not None
        return done or "Ray runtime started" in self.log_of(ray)

    def log_of(self, container: str) -> str:
        """What a container has said so far."""
        path = self._logs / f"{self.name}.{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def execute(self, container: str, command: Sequence[str]) -> tuple[int, str]:
        """Run a command in a container, as `kubectl exec` does; exit code and words."""
        (spec,) = [one for one in self._containers if one["name"] == container]
        done = subprocess.run(
            self._command(spec, command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BOUND_S,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace")

    def keep(self) -> Manifest:
        """Restart what ended and is to be restarted; the status as it is now."""
        if not self._started:
            return {"phase": "Pending", "podIP": self.host.address}
        statuses = []
        for container in self._containers:
            code = self._running[container["name"]].poll()
            if code is not None and self._pod["spec"]["restartPolicy"] == "Always":
                self._start(container)
                code = None
            state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
            statuses.append({"name": container["name"], "state": state})
        codes = [one["state"].get("terminated", {}).get("exitCode") for one in statuses]
        phase = "Running"
        if None not in codes:
            phase = "Failed" if any(codes) else "Succeeded"
        return {"phase": phase, "podIP": self.host.address, "containerStatuses": statuses}

    def end(self) -> None:
        """Run the hooks of what still runs, ask it to end, give it what is left of its time."""
        deadline = time.monotonic() + self._pod["spec"].get("terminationGracePeriodSeconds", 30)
        for container in self._containers if self._started else ():
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            if hook and self._running[container["name"]].poll() is None:
                self.hook_said[container["name"]] = self.execute(container["name"], hook)
        for running in self._running.values():
            for child in find_children(running.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
        for running in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(max(0.1, deadline - time.monotonic()))

    @property
    def _containers(self) -> list[Manifest]:
        return list(self._pod["spec"]["containers"])

    def _start(self, container: Manifest) -> None:
        name = container["name"]
        if name in self._running and len(self._containers) == 1:
            # A container's end is the end of all that ran in it.
            for process in self.host.processes - self._before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        command = [*container.get("command", []), *container.get("args", [])]
        with (self._logs / f"{self.name}.{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._command(container, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _command(self, container: Manifest, command: Sequence[str]) -> list[str]:
        environment = dict(self._environment)
        for one in container.get("env", []):
            environment[one["name"]] = one.get("value", "") or self._value(one["valueFrom"])
        words = [REFERENCE.sub(lambda m: environment.get(m[1], m[0]), word) for word in command]
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        # What others of the pod have in /tmp/ray is seen by those alone that mount the volume.
        apart = ("unshare", "--mount", "bash", "-c", 'mount -t tmpfs none /tmp/ray; exec "$@"', "-")
        return [
            *self.host.space.all,
            *("setpriv", "--pdeathsig", "KILL", "env", "--ignore-environment"),
            *(f"{name}={value}" for name, value in environment.items()),
            *(() if "/tmp/ray" in mounted or len(self._containers) == 1 else apart),
            *words,
        ]

    def _value(self, source: Manifest) -> str:
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            return self._secrets[reference["name"]][reference["key"]].decode()
        path = source["fieldRef"]["fieldPath"]
        if found := FIELD.fullmatch(path):
            return str(self._pod["metadata"]["labels"][found[1]])
        return str(self._pod["metadata"][path.removeprefix("metadata.")])

    def _write(self, path: str, data: bytes) -> None:
        entered = [*self.host.space.all, "bash", "-c", f"umask 077; cat > {path}"]
        subprocess.run(entered, input=data, check=True, timeout=BOUND_S)
