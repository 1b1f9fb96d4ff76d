"""What KubeRay's operator makes of a RayCluster: which pods there are to be, and what runs in each.

In our words, after ray-operator/controllers/ray of ray-project/kuberay at commit feeaf72
(`common/pod.go`, `utils/util.go`, `raycluster_controller.go`): a cluster without the operator's
other features. What it would only log as an error is an error here.
"""

import copy
import json
import math
import secrets
from collections.abc import Iterator
from typing import Any

from ray.autoscaler._private.kuberay.utils import parse_quantity

Manifest = dict[str, Any]

NAMESPACE = "default"
GCS_PORT = "6379"
COMMAND = ["/bin/bash", "-c", "--"]
AUTOSCALER_COMMAND = (
    "ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME)"
    " --cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
)
VALUED_SWITCHES = ("log-color", "include-dashboard", "include-log-monitor")


def head_service(cluster: Manifest) -> str:
    """Name by which pods reach the head."""
    return f"{cluster['metadata']['name']}-head-svc.{NAMESPACE}.svc.cluster.local"


def find_group(cluster: Manifest, name: str) -> Manifest:
    """The worker group of a name."""
    (found,) = [one for one in cluster["spec"]["workerGroupSpecs"] if one["groupName"] == name]
    return dict(found)


def desired_pods(group: Manifest) -> int:
    """How many pods a worker group is to have: its replicas, within its bounds."""
    within = max(group["replicas"], group["minReplicas"])
    return int(min(within, group["maxReplicas"])) * int(group["numOfHosts"])


def has_autoscaler(cluster: Manifest) -> bool:
    """Whether the head has the autoscaler beside it."""
    return cluster["spec"].get("enableInTreeAutoscaling") is True


def make_head_pod(cluster: Manifest) -> Manifest:
    """The head's pod, with the autoscaler as its last container where it is turned on."""
    group = copy.deepcopy(cluster["spec"]["headGroupSpec"])
    pod = _pod(cluster, group, "headgroup", "head")
    parameters = {"dashboard-host": "0.0.0.0"} | group["rayStartParams"]
    ray = pod["spec"]["containers"][0]
    if has_autoscaler(cluster):
        parameters["no-monitor"] = "true"
        pod["spec"]["containers"].append(_autoscaler(cluster, ray["image"]))
        version = cluster["spec"].get("autoscalerOptions", {}).get("version")
        if version is not None:
            value = "true" if version == "v2" else "false"
            ray.setdefault("env", []).append({"name": "RAY_enable_autoscaler_v2", "value": value})
        if version == "v2":
            pod["spec"]["restartPolicy"] = "Never"
    _complete(cluster, pod, f"ray start --head {_start_flags(ray, parameters)}", "127.0.0.1")
    return pod


def make_worker_pod(cluster: Manifest, name: str) -> Manifest:
    """A pod of a worker group; its name is another one every time."""
    group = copy.deepcopy(find_group(cluster, name))
    pod = _pod(cluster, group, name, "worker")
    host = head_service(cluster)
    parameters = {"address": f"{host}:{GCS_PORT}"} | group["rayStartParams"]
    ray = pod["spec"]["containers"][0]
    named = [("FQ_RAY_IP", host), ("RAY_IP", host.partition(".")[0])]
    ray.setdefault("env", []).extend({"name": name, "value": value} for name, value in named)
    if cluster["spec"].get("autoscalerOptions", {}).get("version") == "v2":
        pod["spec"]["restartPolicy"] = "Never"
    _complete(cluster, pod, f"ray start {_start_flags(ray, parameters)}", host)
    wait = f"until ray health-check --address {host}:{GCS_PORT}; do sleep 15; done"  # KubeRay: 5
    pod["spec"]["initContainers"] = [
        ray | {"name": "wait-gcs-ready", "command": COMMAND, "args": [wait]}
    ]
    return pod


def _pod(cluster: Manifest, group: Manifest, group_name: str, kind: str) -> Manifest:
    name = cluster["metadata"]["name"]
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{name}-{kind}",
        **group["template"]["metadata"]["labels"],
        "ray.io/cluster": name,
        "ray.io/node-type": kind,
        "ray.io/group": group_name,
    }
    stem = f"{name}-{group_name if kind == 'worker' else 'head'}"
    spec = {"restartPolicy": "Always"} | group["template"]["spec"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{stem}-{secrets.token_hex(3)}",
            "namespace": NAMESPACE,
            "labels": labels,
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    }


def _autoscaler(cluster: Manifest, image: str) -> Manifest:
    options = cluster["spec"].get("autoscalerOptions", {})
    container = {
        "name": "autoscaler",
        "image": image,
        "env": [
            _field("RAY_CLUSTER_NAME", "metadata.labels['ray.io/cluster']"),
            _field("RAY_CLUSTER_NAMESPACE", "metadata.namespace"),
            _field("RAY_HEAD_POD_NAME", "metadata.name"),
            {"name": "KUBERAY_CRD_VER", "value": "v1"},
            {"name": "KUBERAY_GEN_AUTOSCALER_START_CMD", "value": AUTOSCALER_COMMAND},
            *_token(cluster),
            *options.get("env", []),
        ],
        "command": COMMAND,
        "args": [AUTOSCALER_COMMAND],
        "volumeMounts": list(options.get("volumeMounts", [])),
    }
    given = ("resources", "securityContext", "command", "args")
    return container | {name: options[name] for name in given if name in options}


def _complete(cluster: Manifest, pod: Manifest, command: str, head: str) -> None:
    """Give Ray's container its command, and the environment that every one gets."""
    ray = pod["spec"]["containers"][0]
    ray["command"] = COMMAND
    ray["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {command}"]
    env = ray.setdefault("env", [])
    env += [
        *_token(cluster),
        _field("RAY_CLUSTER_NAME", "metadata.labels['ray.io/cluster']"),
        _field("RAY_CLUSTER_NAMESPACE", "metadata.namespace"),
        _field("RAY_CLOUD_INSTANCE_ID", "metadata.name"),
        _field("RAY_NODE_TYPE_NAME", "metadata.labels['ray.io/group']"),
        {"name": "KUBERAY_GEN_RAY_START_CMD", "value": command},
    ]
    defaults = {
        "RAY_PORT": GCS_PORT,
        "RAY_ADDRESS": f"{head}:{GCS_PORT}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    there = {one["name"] for one in env}
    env += [{"name": name, "value": v} for name, v in defaults.items() if name not in there]


def _token(cluster: Manifest) -> Iterator[Manifest]:
    if cluster["spec"].get("authOptions", {}).get("mode") == "token":
        secret = {"name": cluster["metadata"]["name"], "key": "auth_token"}
        yield {"name": "RAY_AUTH_MODE", "value": "token"}
        yield {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _start_flags(container: Manifest, given: Manifest) -> str:
    parameters = {
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        **given,
        "block": "true",
    }
    resources = container.get("resources", {})
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    num_cpus = limits.get("cpu") or requests.get("cpu")
    if num_cpus:
        parameters.setdefault("num-cpus", _whole(num_cpus))
    if limits.get("memory"):
        parameters.setdefault("memory", _whole(limits["memory"]))
    # The operator leaves the GPUs out where it cannot read what is beside them.
    json.loads(parameters.get("resources", "{}").strip("'\"` "))
    for name, amount in sorted(limits.items()):
        if name.endswith("gpu"):
            parameters.setdefault("num-gpus", _whole(amount))
    return " ".join(_flag(name, value) for name, value in sorted(parameters.items()))


def _flag(name: str, value: str) -> str:
    if value.lower() in ("true", "false") and name not in VALUED_SWITCHES:
        return f"--{name}" if value.lower() == "true" else ""
    return f"--{name}={value}"


def _whole(quantity: str) -> str:
    return str(math.ceil(parse_quantity(quantity)))
