"""k8s/: the Kubernetes schemas and KubeRay's CRD accept it; pods agree with the settings."""

import copy
import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import start as ray_start

from disagg.config import read_settings
from disagg.router.options import RouterOptions
from disagg.router.status_pages import StatusPages
from tests.unit.launch.commands import parse_command
from tests.unit.launch.rendered import K8S, Manifest
from tests.unit.launch.schemas import VERSION, crd_schema, validate_raycluster

BASE = K8S / "base"
CRD_VARIABLE = "DISAGG_TEST_KUBERAY_CRD"
"""Path of KubeRay's ray.io_rayclusters.yaml, which is not part of this project."""
CRD = os.environ.get(CRD_VARIABLE, "")
RAYLET_END_S = 30
"""`ray start --block` drains its node for so long after SIGTERM."""
SETTINGS = read_settings(BASE / "disagg.yaml").settings


def read(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((BASE / name).read_text()))


ROUTER, BUDGET, CLIENTS, REGISTRATION = read("router.yaml")
(MODELS,) = read("models.yaml")
(RAYCLUSTER,) = read("raycluster.yaml")
POLICIES = read("network.yaml")
GROUPS: list[Manifest] = RAYCLUSTER["spec"]["workerGroupSpecs"]


def broken(manifest: Manifest, change: Callable[[Manifest], object]) -> Manifest:
    changed = copy.deepcopy(manifest)
    change(changed)
    return changed


def pods() -> Iterator[Manifest]:
    yield ROUTER["spec"]["template"]["spec"]
    yield RAYCLUSTER["spec"]["headGroupSpec"]["template"]["spec"]
    yield from (group["template"]["spec"] for group in GROUPS)


def containers() -> list[Manifest]:
    return [container for pod in pods() for container in pod["containers"]]


@pytest.mark.parametrize(
    "manifest", [ROUTER, BUDGET, CLIENTS, REGISTRATION, MODELS], ids=lambda m: m["kind"]
)
def test_kubernetes_accepts_it(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize(
    ("manifest", "change"),
    [
        (ROUTER, lambda m: m["spec"].update(replica=1)),
        (ROUTER, lambda m: m["spec"].pop("selector")),
        (ROUTER, lambda m: m["spec"]["template"]["spec"]["containers"][0].update(port=1)),
        (CLIENTS, lambda m: m["spec"]["ports"][0].update(port="http")),
    ],
)
def test_kubernetes_refuses_a_broken_one(
    manifest: Manifest, change: Callable[[Manifest], object]
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        kubernetes_validate.validate(broken(manifest, change), VERSION, strict=True)


BROKEN_RAYCLUSTERS: list[Callable[[Manifest], object]] = [
    lambda m: m["spec"].update(workerGroups=[]),
    lambda m: m["spec"].pop("headGroupSpec"),
    lambda m: m["spec"]["workerGroupSpecs"][0].pop("groupName"),
    lambda m: m["spec"]["workerGroupSpecs"][0].update(replicas="one"),
    lambda m: m["spec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    lambda m: m["spec"]["authOptions"].update(mode="tokens"),
    lambda m: m["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(ports=[{}]),
]


def test_the_raycluster_is_sound() -> None:
    validate_raycluster(RAYCLUSTER)


@pytest.mark.parametrize("change", BROKEN_RAYCLUSTERS)
def test_a_broken_raycluster_is_refused(change: Callable[[Manifest], object]) -> None:
    with pytest.raises((jsonschema.ValidationError, KeyError)):
        validate_raycluster(broken(RAYCLUSTER, change))


@pytest.mark.skipif(not CRD, reason=f"{CRD_VARIABLE} does not name KubeRay's CRD")
def test_kuberays_crd_accepts_it_and_refuses_broken_ones() -> None:
    validator = jsonschema.Draft202012Validator(crd_schema(Path(CRD)))
    assert [error.message for error in validator.iter_errors(RAYCLUSTER)] == []
    for change in BROKEN_RAYCLUSTERS:
        assert not validator.is_valid(broken(RAYCLUSTER, change))


def test_commands_and_their_config_file() -> None:
    commands = [c["command"] for c in containers() if "command" in c]
    assert [command[:2] for command in commands] == [["disagg", "router"], ["disagg", "workers"]]
    for command in commands:
        parse_command(command[1:])
        assert command[command.index("--config") + 1] == "/etc/disagg/disagg.yaml"
    kustomization = read("kustomization.yaml")[0]
    generated = kustomization["configMapGenerator"][0]
    assert generated == {"name": "disagg-config", "files": ["disagg.yaml"]}


def test_pods_agree_with_the_settings() -> None:
    replicas = {group["groupName"]: group["replicas"] for group in GROUPS}
    cluster = SETTINGS.cluster
    assert replicas == {"prefill": cluster.num_prefill, "decode": cluster.num_decode}
    assert cluster.role_resources
    for group in GROUPS:
        text = group["rayStartParams"]["resources"]
        (for_ray,) = shlex.split(text)  # the command that KubeRay makes is a line of shell
        for_operator = text.strip("'\"` ")  # it adds GPUs to what it reads so
        for_autoscaler = text[1:-1].replace("\\", "")
        for one in (for_ray, for_operator, for_autoscaler):
            assert json.loads(one) == {f"disagg_{group['groupName']}": 1}
    ports = {p["name"]: p["containerPort"] for p in containers()[0]["ports"]}
    router = SETTINGS.router
    assert ports == {
        "http": router.http_port,
        "admin": router.admin_port,
        "grpc": router.grpc_port,
    }
    name = REGISTRATION["metadata"]["name"]
    port = REGISTRATION["spec"]["ports"][0]["port"]
    assert cluster.router_addresses == (f"dns:{name}:{port}",)
    for pod in pods():
        if SETTINGS.model.dir.startswith("/models/") and "shareProcessNamespace" not in pod:
            mounts = [m["mountPath"] for m in pod["containers"][0]["volumeMounts"]]
            assert "/models" in mounts


def secret_at(pod: Manifest, container: Manifest, path: str) -> str:
    """Name of the Secret that a container finds a file in; "" where it finds none."""
    mounts = {m["name"] for m in container["volumeMounts"] if path.startswith(m["mountPath"] + "/")}
    (name, *_) = [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] in mounts] or [""]
    return str(name)


def test_secrets_are_mounted_where_the_settings_look_and_nowhere_else() -> None:
    keys, hash_key = SETTINGS.router.api_keys_file, SETTINGS.cluster.hash_key_file
    found = {
        container["name"]: [secret_at(pod, container, path) for path in (keys, hash_key)]
        for pod in pods()
        for container in pod["containers"]
    }
    assert found == {
        "router": ["disagg-api-keys", "disagg-hash-key"],
        "ray-head": ["", ""],
        "disagg-workers": ["", "disagg-hash-key"],
        "ray-worker": ["", ""],
    }
    assert not SETTINGS.router.allow_unauthenticated
    told = (K8S / "README.md").read_text()
    for name, path in (("disagg-api-keys", keys), ("disagg-hash-key", hash_key)):
        assert f"kubectl create secret generic {name} --from-file={Path(path).name}" in told


def test_clients_do_not_reach_the_admin_port() -> None:
    for service in (CLIENTS, REGISTRATION):
        assert "admin" not in [port["targetPort"] for port in service["spec"]["ports"]]


def test_services_choose_the_router_and_probes_ask_it() -> None:
    labels = ROUTER["spec"]["template"]["metadata"]["labels"]
    assert CLIENTS["spec"]["selector"] == REGISTRATION["spec"]["selector"] == labels
    container = containers()[0]
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}


def test_routers_are_rolled_one_by_one_and_have_time_to_drain() -> None:
    assert ROUTER["spec"]["replicas"] > 1
    assert ROUTER["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    # Workers find one that is not ready yet, which becomes so by them.
    assert REGISTRATION["spec"]["clusterIP"] == "None"
    assert REGISTRATION["spec"]["publishNotReadyAddresses"] is True
    spec = ROUTER["spec"]["template"]["spec"]
    command, seconds = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    left_s = spec["terminationGracePeriodSeconds"] - int(seconds)
    assert left_s * 1000 > SETTINGS.router.drain_timeout_ms


def test_a_pods_worker_drains_before_ray_is_stopped_and_has_time_for_it() -> None:
    bound_s = SETTINGS.worker.drain_timeout_ms / 1000 + SETTINGS.cluster.stop_timeout_s
    for group in GROUPS:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["disagg", "workers", "--end-here"]
        parse_command(command[1:])
        # By the settings that its worker has: they say how long a drain takes.
        folder = str(Path(command[command.index("--config") + 1]).parent)
        (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == folder]
        (volume,) = [one for one in spec["volumes"] if one["name"] == mount["name"]]
        assert volume["configMap"]["name"] == "disagg-config"
        assert spec["terminationGracePeriodSeconds"] > bound_s + RAYLET_END_S


def test_workers_run_at_the_niceness_of_others() -> None:
    """Said where the raylet starts, which starts the workers."""
    raylets = [c for c in containers() if c["name"] in ("ray-head", "ray-worker")]
    assert len(raylets) == 3
    for raylet in raylets:
        assert {"name": "RAY_worker_niceness", "value": "0"} in raylet["env"]


def test_pods_are_confined_and_bounded() -> None:
    for pod in pods():
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers():
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"]["memory"]
        assert container["image"] == "disagg"


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes selects such pods."""
    wanted = selector.get("matchLabels", {}).items()
    for one in selector.get("matchExpressions", ()):
        assert one["operator"] == "In"
    return wanted <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )


def opens(entry: Manifest, port: int | str) -> bool:
    """Whether an entry of a rule's ports is, or has in its range, a port."""
    first: int | str = entry["port"]
    last: Any = entry.get("endPort", first)
    return first == port or (
        isinstance(first, int) and isinstance(port, int) and first <= port <= last
    )


def reaches(source: str, target: str, port: int | str) -> bool:
    """Whether a pod of that component ("": of another system) may connect to a port of another."""
    labels = {"app.kubernetes.io/name": "disagg", "app.kubernetes.io/component": target}
    own = {"app.kubernetes.io/name": "disagg" if source else "other"}
    own["app.kubernetes.io/component"] = source
    chosen = [one for one in POLICIES if selects(one["spec"]["podSelector"], labels)]
    assert chosen, f"{target} is open to everybody"
    return any(
        any(opens(one, port) for one in rule["ports"])
        and (
            "from" not in rule
            or any(
                "podSelector" in one and selects(one["podSelector"], own) for one in rule["from"]
            )
        )
        for one in chosen
        for rule in one["spec"]["ingress"]
    )


@pytest.mark.parametrize("manifest", POLICIES, ids=lambda m: m["metadata"]["name"])
def test_kubernetes_accepts_the_policies(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_policies_open_what_the_settings_name_and_no_more() -> None:
    worker = SETTINGS.worker
    grpc, transfer = int(worker.port), int(worker.transfer_port)
    for target in ("prefill", "decode"):
        for source in ("prefill", "decode", "head"):
            assert reaches(source, target, transfer) == (source != "head")
            assert reaches(source, target, grpc) == (source != "head")
        assert reaches("router", target, grpc)
        assert not reaches("router", target, transfer)
        assert not reaches("", target, grpc)
        assert not reaches("", target, transfer)
        assert not reaches("router", "head", 6379)
    assert reaches("", "router", "http")
    assert reaches("", "router", "admin")  # of this namespace
    assert reaches("prefill", "router", "grpc")
    assert not reaches("", "router", SETTINGS.router.grpc_port + 1)


def test_routers_and_workers_have_the_certificate_and_only_they() -> None:
    router, head, *groups = pods()
    for pod in (router, *groups):
        (volume,) = [one for one in pod["volumes"] if one["name"] == "tls"]
        # With fsGroup the user of the pods can read it, and nobody else.
        assert volume["secret"] == {"secretName": "disagg-tls", "defaultMode": 0o440}
        (container,) = pod["containers"]
        mounts = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
        assert [one["mountPath"] for one in mounts] == [SETTINGS.cluster.tls_directory]
    assert not any(one["name"] == "tls" for one in head["volumes"])


RAY_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "min-worker-port",
    "max-worker-port",
)


def test_the_policies_open_rays_ports_among_its_pods() -> None:
    head: Manifest = RAYCLUSTER["spec"]["headGroupSpec"]["rayStartParams"]
    known = {name.lstrip("-").replace("-", "_") for p in ray_start.params for name in p.opts}
    for group in (head, *(group["rayStartParams"] for group in GROUPS)):
        assert {name.replace("-", "_") for name in group} <= known
        first, last = int(group["min-worker-port"]), int(group["max-worker-port"])
        ports = {int(group[name]) for name in RAY_PORTS} | set(range(first, last + 1))
        assert len(ports) == len(RAY_PORTS) - 2 + last - first + 1  # no two are the same
        for port in ports:
            for source in ("head", "prefill", "decode"):
                assert reaches(source, "prefill", port)
                assert reaches(source, "head", port)
            for source in ("router", ""):
                assert not reaches(source, "decode", port)
    assert last - first >= 64  # Ray takes one for each of its processes on a node
    for port in (int(head["port"]), int(head["dashboard-port"])):
        assert reaches("prefill", "head", port)
        assert not reaches("prefill", "decode", port)
        assert not reaches("router", "head", port)
        assert not reaches("", "head", port)


def test_probes_ask_for_pages_that_there_are() -> None:
    nobody = cast(Any, None)  # the pages are listed before anybody is asked
    pages = StatusPages(RouterOptions(model_dir="", model_name="m"), nobody).pages
    probes = [v for k, v in containers()[0].items() if k.endswith("Probe")]
    assert len(probes) == 3
    for probe in probes:
        assert ("GET", probe["httpGet"]["path"]) in pages
        assert pages["GET", probe["httpGet"]["path"]].scopes == frozenset()  # no key is asked for
    assert ("GET", "/healthz") not in pages


def test_a_rollout_may_take_as_long_as_a_fleet_to_start() -> None:
    assert ROUTER["spec"]["progressDeadlineSeconds"] > SETTINGS.cluster.start_timeout_s


def test_disruptions_leave_a_router() -> None:
    assert BUDGET["spec"]["selector"]["matchLabels"] == ROUTER["spec"]["selector"]["matchLabels"]
    assert BUDGET["spec"]["maxUnavailable"] < ROUTER["spec"]["replicas"]


def test_pods_keep_apart() -> None:
    for pod, labels in (
        (ROUTER["spec"]["template"]["spec"], [ROUTER["spec"]["template"]["metadata"]["labels"]]),
        *(
            (g["template"]["spec"], [o["template"]["metadata"]["labels"] for o in GROUPS])
            for g in GROUPS
        ),
    ):
        (term,) = pod["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        for own in labels:
            assert selects(term["podAffinityTerm"]["labelSelector"], own)


def test_the_volume_claim_is_the_one_that_pods_mount() -> None:
    name = MODELS["metadata"]["name"]
    for pod in pods():
        claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "models"]
        assert claims == [{"claimName": name, "readOnly": True}]
