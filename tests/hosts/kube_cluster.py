"""A Kubernetes cluster for one RayCluster: API, KubeRay's operator, kubelets, a host for each pod.

The first host is the control plane, and where clients are; the second is the router's.
"""

import base64
import copy
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.hosts.hosts import Host, Hosts
from tests.hosts.kubelet import Pod
from tests.hosts.kuberay import (
    NAMESPACE,
    desired_pods,
    head_service,
    make_head_pod,
    make_worker_pod,
)
from tests.hosts.kubernetes_api import ApiServer, KubernetesApi

Manifest = dict[str, Any]

BOUND_S = 1500.0
POLL_S = 0.5
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}


class KubeCluster:
    """Everything around Ray and disagg; both are real.

    Attributes:
        api: its objects, and what was asked of it.
        has_room: whether new pods find a node; while not, they stay pending.
        ended: pods that have been deleted, with what their hooks said.
        faults: what the operator could not do.
    """

    def __init__(
        self,
        machines: Hosts,
        objects: Sequence[Manifest],
        environment: Path,
        folder: Path,
        validate: Callable[[Manifest], None],
    ) -> None:
        """Nothing runs yet.

        Args:
            machines: enough for all pods, and two.
            objects: of the overlay, as they are applied.
            environment: with the commands `ray` and `disagg`.
            folder: empty, for logs and secrets.
            validate: see `KubernetesApi`.
        """
        self.control, self.front, *self._free = machines
        self.has_room = True
        self.ended: list[Pod] = []
        self.faults: list[str] = []
        self._machines = machines
        self._logs = folder
        self._objects = objects
        token = secrets.token_hex(16)
        self.api = KubernetesApi(NAMESPACE, token, validate)
        (self._applied,) = [one for one in objects if one["kind"] == "RayCluster"]
        self.name: str = self._applied["metadata"]["name"]
        self._secrets = make_secrets(folder, environment, self.name)
        with self.control.network():
            certificate = make_certificate(folder, self.control.address)
            self._server = ApiServer(self.api, self.control.address, *certificate)
        account = {"token": token.encode(), "ca.crt": certificate[0].read_bytes()}
        self._account = {ACCOUNT: account}
        self._environment = {
            "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/root",
            "PYTHONUNBUFFERED": "1",
            "KUBERNETES_SERVICE_HOST": self.control.address,
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self._server.port),
            # Of this machine, which is small and busy.
            "RAY_raylet_start_wait_time_s": "600",
            "OMP_NUM_THREADS": "1",
        }
        self._pods: dict[str, Pod] = {}
        self._begun: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._operator = threading.Thread(target=self._operate, daemon=True)

    def key_of(self, user: str) -> str:
        """A key that routers take, of the client or of the observer."""
        return self._secrets["of-users"][user].decode()

    def start(self) -> None:
        """Apply all objects; the operator begins."""
        head, router = self._free[0], self.front
        names = f"{head.address} {head_service(self._applied)}\n{router.address} disagg-router\n"
        for host in self._machines:
            host.run(f"printf %s {shlex.quote(names)} >> /etc/hosts")
        self._names = names
        (deployment,) = [one for one in self._objects if one["kind"] == "Deployment"]
        template = deployment["spec"]["template"]
        made = {"metadata": {"name": "router", "labels": {}}, "spec": dict(template["spec"])}
        made["spec"].setdefault("restartPolicy", "Always")
        self.router = self._pod(made, router)
        self.router.start()
        self.apply(lambda cluster: None)
        self._operator.start()

    def end(self) -> None:
        """Stop the operator, and answer nobody any more; pods end with their hosts."""
        self._stopping.set()
        if self._operator.is_alive():
            self._operator.join(BOUND_S)
        for thread in self._begun:
            thread.join(BOUND_S)
        self._server.end()

    def apply(self, edit: Callable[[Manifest], None]) -> None:
        """Edit what is applied, and `kubectl apply` it: what it does not say stays as it is."""
        edit(self._applied)
        made = copy.deepcopy(self._applied)
        there = [
            one for one in self.api.find_all("rayclusters") if one["metadata"]["name"] == self.name
        ]
        kept = {g["groupName"]: g for one in there for g in one["spec"]["workerGroupSpecs"]}
        for group in made["spec"]["workerGroupSpecs"]:
            before = kept.get(group["groupName"], {})
            for name in ("replicas", "scaleStrategy"):
                if name in before:
                    group.setdefault(name, before[name])
        self.api.put("rayclusters", made)

    def delete(self, name: str) -> None:
        """Delete a pod, as `kubectl delete pod` or the drain of its node do."""
        if "deletionTimestamp" in self.api.get("pods", name)["metadata"]:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.api.change("pods", name, lambda pod: pod["metadata"].update(deletionTimestamp=stamp))
        self._do(lambda: self._end(name))

    # What a test looks at

    @property
    def cluster(self) -> Manifest:
        """The RayCluster as it is."""
        return self.api.get("rayclusters", self.name)

    def group(self, name: str) -> Manifest:
        """A worker group as it is."""
        (found,) = [g for g in self.cluster["spec"]["workerGroupSpecs"] if g["groupName"] == name]
        return dict(found)

    def pods(self, group: str) -> list[Manifest]:
        """Pods of a group that are not about to end."""
        return [one for one in self._all_of(group) if "deletionTimestamp" not in one["metadata"]]

    @property
    def head(self) -> Pod:
        """The head's pod."""
        (name,) = [one["metadata"]["name"] for one in self.pods("headgroup")]
        return self._pods[name]

    @property
    def num_looks(self) -> int:
        """How often the autoscaler has looked at all pods."""
        return sum("labelSelector" in call.path for call in list(self.api.calls))

    # The operator and the kubelets

    def _all_of(self, group: str) -> list[Manifest]:
        there = self.api.find_all("pods")
        return [one for one in there if one["metadata"]["labels"]["ray.io/group"] == group]

    def _operate(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self._reconcile()
                self._keep()
            except Exception as error:
                self.faults.append(repr(error))

    def _reconcile(self) -> None:
        cluster = self.cluster
        if not self.pods("headgroup"):
            self.api.put("pods", make_head_pod(cluster))
        for group in cluster["spec"]["workerGroupSpecs"]:
            # A pod that is about to end counts until it has.
            there = {one["metadata"]["name"]: one for one in self._all_of(group["groupName"])}
            done = [
                name
                for name, one in there.items()
                if one["status"]["phase"] in ("Failed", "Succeeded")
                and "deletionTimestamp" not in one["metadata"]
            ]
            for name in done:
                self.delete(name)
            if done:
                return  # with an error: it begins again
            for name in group.get("scaleStrategy", {}).get("workersToDelete", []):
                if there.pop(name, None) is not None:
                    self.delete(name)
            # Too many are left alone: the autoscaler says which are to go.
            for _ in range(desired_pods(group) - len(there)):
                self.api.put("pods", make_worker_pod(cluster, group["groupName"]))

    def _do(self, step: Callable[[], None]) -> None:
        """Begin what takes a while; a fault of it is one of the cluster's."""

        def run() -> None:
            try:
                step()
            except Exception as error:
                self.faults.append(repr(error))

        begun = threading.Thread(target=run, daemon=True)
        self._begun.append(begun)
        begun.start()

    def _end(self, name: str) -> None:
        pod = self._pods.pop(name, None)
        if pod is not None:
            pod.end()
            self.ended.append(pod)
            self._machines.restart(pod.host)
            pod.host.run(f"printf %s {shlex.quote(self._names)} >> /etc/hosts")
            self._free.append(pod.host)
        self.api.remove("pods", name)

    def _keep(self) -> None:
        for manifest in self.api.find_all("pods"):
            name = manifest["metadata"]["name"]
            if "deletionTimestamp" in manifest["metadata"]:
                continue
            if name in self._pods:
                status = self._pods[name].keep()
            elif self._may_start(manifest):
                self._pods[name] = pod = self._pod(manifest, self._free.pop(0))
                self._do(pod.start)
                status = pod.keep()
            else:
                status = {"phase": "Pending", "conditions": [UNSCHEDULABLE]}
            if status != manifest["status"]:
                self.api.change("pods", name, partial(_set_status, status))

    def _may_start(self, manifest: Manifest) -> bool:
        """Whether a pod finds a node; nodes come one by one, as a small machine has them all."""
        others = [pod for pod in self._pods.values() if not pod.runs_ray]
        is_head = manifest["metadata"]["labels"]["ray.io/node-type"] == "head"
        return not others and bool(self._free) and (self.has_room or is_head)

    def _pod(self, manifest: Manifest, host: Host) -> Pod:
        volumes = {volume["name"]: volume for volume in manifest["spec"].get("volumes", [])}
        files: dict[str, Mapping[str, bytes]] = {}
        for container in manifest["spec"]["containers"]:
            for mount in container.get("volumeMounts", []):
                found = self._files(volumes[mount["name"]])
                if found is not None:
                    files[mount["mountPath"]] = found
        if manifest["metadata"]["labels"].get("ray.io/node-type") == "head":
            files |= self._account
        return Pod(manifest, host, files, self._secrets, self._environment, self._logs)

    def _files(self, volume: Manifest) -> Mapping[str, bytes] | None:
        if "secret" in volume:
            return self._secrets[volume["secret"]["secretName"]]
        if "configMap" in volume:
            (found,) = [
                one
                for one in self._objects
                if one["kind"] == "ConfigMap"
                and one["metadata"]["name"] == volume["configMap"]["name"]
            ]
            return {name: text.encode() for name, text in found["data"].items()}
        return None


def _set_status(status: Manifest, pod: Manifest) -> None:
    pod["status"] = status


def make_secrets(folder: Path, environment: Path, cluster: str) -> dict[str, dict[str, bytes]]:
    """The secrets of k8s/README.md by its commands, and the token that the operator makes."""
    disagg = f"{environment}/bin/disagg"

    def do(*arguments: str) -> str:
        return subprocess.run(
            [disagg, *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout

    do("certificates", "create", "--directory", "certificates")
    do("keys", "create-hash-key", "hash-key")
    add = ("keys", "create", "--file", "keys.json", "--tenant")
    client = do(*add, "my-team", "--name", "me")
    observer = do(*add, "ops", "--name", "prometheus", "--scope", "observe")
    tls = {path.name: path.read_bytes() for path in (folder / "certificates" / "node").iterdir()}
    return {
        "disagg-tls": tls,
        "disagg-hash-key": {"hash-key": (folder / "hash-key").read_bytes()},
        "disagg-api-keys": {"keys.json": (folder / "keys.json").read_bytes()},
        cluster: {"auth_token": base64.b64encode(secrets.token_bytes(32))},
        "of-users": {
            "client": client.split()[-1].encode(),
            "observer": observer.split()[-1].encode(),
        },
    }


def make_certificate(folder: Path, address: str) -> tuple[Path, Path]:
    """A certificate that trusts itself, for an address."""
    certificate, key = folder / "api.crt", folder / "api.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=kubernetes"),
            *("-addext", f"subjectAltName=IP:{address}"),
            *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            *("-out", str(certificate), "-keyout", str(key)),
        ],
        capture_output=True,
        check=True,
    )
    return certificate, key
