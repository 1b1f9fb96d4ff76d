"""Every overlay of k8s/ is rendered, fits the schemas, and means what the code understands."""

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from disagg.config import Settings, read_settings
from tests.unit.launch.rendered import (
    K8S,
    OVERLAYS,
    Manifest,
    needs_kustomize,
    of_kind,
    overlay,
    pod_templates,
    render,
)
from tests.unit.launch.schemas import OWN_SCHEMAS, crd_schemas, validate

pytestmark = needs_kustomize

CRDS_VARIABLE = "DISAGG_TEST_CRDS"
"""A folder of CRDs (RayCluster, PodMonitor, InferencePool, ...), not part of this project."""
CRDS = os.environ.get(CRDS_VARIABLE, "")
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
README = (K8S / "README.md").read_text()


def containers(manifests: tuple[Manifest, ...]) -> Iterator[Manifest]:
    for manifest in manifests:
        for template in pod_templates(manifest):
            yield from template["spec"]["containers"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_object_fits_its_schema(name: str) -> None:
    for manifest in overlay(name):
        validate(manifest)


BROKEN: list[tuple[str, str, Callable[[Manifest], object]]] = [
    ("autoscaling", "HorizontalPodAutoscaler", lambda m: m["spec"].update(replicas=2)),
    ("autoscaling", "RayCluster", lambda m: m["spec"]["autoscalerOptions"].update(idle=1)),
    ("gateway", "InferencePool", lambda m: m["spec"].update(targetPorts=[8000])),
    ("gateway", "InferencePool", lambda m: m["spec"].update(targetPortNumber=8000)),
    ("gateway", "HTTPRoute", lambda m: m["spec"]["rules"][0].pop("backendRefs")),
    (
        "gcs-fault-tolerance",
        "RayCluster",
        lambda m: m["spec"]["gcsFaultToleranceOptions"].update(redis="x"),
    ),
    ("gcs-fault-tolerance", "StatefulSet", lambda m: m["spec"].pop("selector")),
    ("monitoring", "PodMonitor", lambda m: m["spec"]["podMetricsEndpoints"][0].update(ports=[1])),
    ("cpu", "PersistentVolumeClaim", lambda m: m["spec"].update(accessModes="ReadWriteMany")),
    ("cpu", "PodDisruptionBudget", lambda m: m["spec"].update(maxUnavailble=1)),
]


@pytest.mark.parametrize(("name", "kind", "change"), BROKEN)
def test_a_broken_object_is_refused(
    name: str, kind: str, change: Callable[[Manifest], object]
) -> None:
    manifest = copy.deepcopy(next(one for one in overlay(name) if one["kind"] == kind))
    change(manifest)
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


@pytest.mark.skipif(not CRDS, reason=f"{CRDS_VARIABLE} does not name a folder of CRDs")
def test_the_crds_accept_them_and_refuse_broken_ones() -> None:
    schemas = crd_schemas(Path(CRDS))
    checked = set()
    for name in OVERLAYS:
        for manifest in overlay(name):
            if manifest["kind"] in schemas:
                jsonschema.Draft202012Validator(schemas[manifest["kind"]]).validate(manifest)
                checked.add(manifest["kind"])
    assert checked == schemas.keys() & OWN_SCHEMAS.keys()
    assert checked
    for name, kind, change in BROKEN:
        if kind in schemas:
            manifest = copy.deepcopy(of_kind(overlay(name), kind))
            change(manifest)
            assert not jsonschema.Draft202012Validator(schemas[kind]).is_valid(manifest)


def test_components_go_together(tmp_path: Path) -> None:
    """All of them in either order; a JSON patch that names another group would fail."""
    for order in (COMPONENTS, COMPONENTS[::-1]):
        chosen = [name for name in order if name not in ("image", "host-models", "rayservice")]
        up = os.path.relpath(K8S, tmp_path)
        lines = {
            "resources": [f"{up}/base"],
            "components": [f"{up}/components/{name}" for name in (*chosen, "image")],
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(lines))
        made = render(tmp_path)
        assert {one["kind"] for one in made} == {one["kind"] for one in overlay("production")}
        for manifest in made:
            validate(manifest)


def test_every_component_is_in_an_overlay() -> None:
    used = {
        Path(path).name
        for name in OVERLAYS
        for path in yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())[
            "components"
        ]
    }
    assert used == set(COMPONENTS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_confined_bounded_and_have_an_image(name: str) -> None:
    for manifest in overlay(name):
        for template in pod_templates(manifest):
            spec = template["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] > 0
            assert spec["enableServiceLinks"] is False
    for container in containers(overlay(name)):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d[\w.-]*", container["image"]), container["image"]


def named(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Kind and name of what the pods of an object need to start."""
    for template in pod_templates(manifest):
        for volume in template["spec"].get("volumes", ()):
            if "secret" in volume:
                yield "Secret", volume["secret"]["secretName"]
            if "configMap" in volume:
                yield "ConfigMap", volume["configMap"]["name"]
            if "persistentVolumeClaim" in volume:
                yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        for container in template["spec"]["containers"]:
            for variable in container.get("env", ()):
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    yield "Secret", variable["valueFrom"]["secretKeyRef"]["name"]
    if manifest["kind"] == "PodMonitor":
        for endpoint in manifest["spec"]["podMetricsEndpoints"]:
            yield "Secret", endpoint["authorization"]["credentials"]["name"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_pods_need_is_there_or_is_said_how_to_make(name: str) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in overlay(name)}
    # Of a RayService nobody knows the names of the clusters' Secrets, and nobody needs them.
    clusters = [one["metadata"]["name"] for one in overlay(name) if one["kind"] == "RayCluster"]
    by_kuberay = {("Secret", cluster) for cluster in clusters}
    for manifest in overlay(name):
        for kind, wanted in named(manifest):
            told = f"kubectl create secret generic {wanted}" in " ".join(README.split())
            assert (kind, wanted) in there | by_kuberay or (kind == "Secret" and told), wanted


def test_the_gpu_overlay_gives_each_worker_a_gpu_and_tells_the_engine() -> None:
    cluster = of_kind(overlay("gpu"), "RayCluster")["spec"]
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["image"].endswith("-cuda")
    (supervisor,) = [
        one
        for one in cluster["headGroupSpec"]["template"]["spec"]["containers"]
        if one["name"] == "disagg-workers"
    ]
    assert not supervisor["image"].endswith("-cuda")
    assert effective(supervisor).worker.device == "cuda"
    (plain,) = [c for c in containers(overlay("cpu")) if c["name"] == "disagg-workers"]
    assert effective(plain).worker.device == "auto"


def effective(container: Manifest) -> Settings:
    """The settings that a container's process would have, by its variables and the ConfigMap."""
    variables = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    ours = {name: value for name, value in variables.items() if name.startswith("DISAGG_")}
    return read_settings(K8S / "base/disagg.yaml", environ=ours).settings


def test_with_rdma_kv_never_goes_by_tcp() -> None:
    for name, there in (("rdma", True), ("gpu", False)):
        for group in of_kind(overlay(name), "RayCluster")["spec"]["workerGroupSpecs"]:
            (container,) = group["template"]["spec"]["containers"]
            variables = {v["name"]: v.get("value") for v in container["env"]}
            assert ("rdma/hca" in container["resources"]["limits"]) == there
            assert ("UCX_TLS" in variables) == there
            if there:
                assert {"tcp", "all"}.isdisjoint(variables["UCX_TLS"].split(","))


def test_with_autoscaling_nobody_else_says_how_many() -> None:
    made = overlay("autoscaling")
    scaler = of_kind(made, "HorizontalPodAutoscaler")["spec"]
    router = of_kind(made, "Deployment", scaler["scaleTargetRef"]["name"])
    assert "replicas" not in router["spec"]
    budget = of_kind(made, "PodDisruptionBudget")["spec"]
    assert scaler["minReplicas"] > budget["maxUnavailable"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "no workers, no ready router"
    cpu = router["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    assert cpu == "1"  # what the utilisation is a share of: a router is one process
    cluster = of_kind(made, "RayCluster")["spec"]
    assert cluster["enableInTreeAutoscaling"] is True
    of_ray = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    mounts = cluster["autoscalerOptions"]["volumeMounts"]
    assert [one for one in of_ray if one["mountPath"] == "/tmp/ray"] == mounts
    settings = read_settings(K8S / "base/disagg.yaml").settings.cluster
    for group in cluster["workerGroupSpecs"]:
        assert "replicas" not in group
        # Ray ends in a pod that is given back; a container that starts again would be a new node.
        assert group["template"]["spec"]["restartPolicy"] == "Never"
        wanted = getattr(settings, f"num_{group['groupName']}")
        assert group["minReplicas"] <= wanted <= group["maxReplicas"]


def test_routers_are_the_gateways_pool() -> None:
    made = overlay("gateway")
    router = of_kind(made, "Deployment", "disagg-router")["spec"]["template"]
    pool = of_kind(made, "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"] == router["metadata"]["labels"]
    ports = {p["name"]: p["containerPort"] for p in router["spec"]["containers"][0]["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    picker = pool["spec"]["endpointPickerRef"]
    service = of_kind(made, "Service", picker["name"])
    assert picker["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    deployment = of_kind(made, "Deployment", picker["name"])["spec"]["template"]
    assert service["spec"]["selector"] == deployment["metadata"]["labels"]
    assert f"--pool-name={pool['metadata']['name']}" in deployment["spec"]["containers"][0]["args"]
    (route,) = of_kind(made, "HTTPRoute")["spec"]["rules"]
    assert route["backendRefs"][0]["kind"] == pool["kind"]
    assert route["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_the_head_alone_reaches_its_redis() -> None:
    made = overlay("gcs-fault-tolerance")
    options = of_kind(made, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    service = of_kind(made, "Service", "disagg-redis")
    port = service["spec"]["ports"][0]["port"]
    assert options["redisAddress"] == f"redis://{service['metadata']['name']}:{port}"
    redis = of_kind(made, "StatefulSet")["spec"]["template"]
    assert service["spec"]["selector"] == redis["metadata"]["labels"]
    (secret,) = [v["secret"] for v in redis["spec"]["volumes"] if "secret" in v]
    assert secret["secretName"] == options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"]
    (rule,) = of_kind(made, "NetworkPolicy", "disagg-redis")["spec"]["ingress"]
    head = of_kind(made, "RayCluster")["spec"]["headGroupSpec"]["template"]
    assert rule["from"] == [{"podSelector": {"matchLabels": head["metadata"]["labels"]}}]


def test_models_may_lie_on_the_hosts() -> None:
    made = overlay("host-models")
    assert not [one for one in made if one["kind"] == "PersistentVolumeClaim"]
    for manifest in made:
        for template in pod_templates(manifest):
            (models,) = [v for v in template["spec"]["volumes"] if v["name"] == "models"]
            assert models["hostPath"]["type"] == "Directory"
            assert "persistentVolumeClaim" not in models
