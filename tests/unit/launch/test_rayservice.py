"""The RayService of k8s/: the very RayCluster of another overlay, and what KubeRay needs beside."""

import copy
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray import serve
from ray.dashboard.modules.reporter import healthz_agent
from ray.serve.schema import ServeDeploySchema

from disagg.cluster.serve_app import fleet
from disagg.config import read_settings
from disagg.errors import ConfigError
from tests.unit.launch.rendered import (
    K8S,
    Manifest,
    needs_kustomize,
    of_kind,
    overlay,
    raycluster_of,
    render,
)
from tests.unit.launch.schemas import crd_schema, validate

pytestmark = needs_kustomize

CRD = os.environ.get("DISAGG_TEST_KUBERAY_CRD", "")
SETTINGS = read_settings(K8S / "base/disagg.yaml").settings
PREFIX_VARIABLE = "DISAGG_CLUSTER__WORKER_ID_PREFIX"
PREFIX = {
    "name": PREFIX_VARIABLE,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['ray.io/cluster']"}},
}
"""KubeRay names the cluster in this label of every pod (RayClusterLabelKey)."""


def rayservice() -> Manifest:
    return of_kind(overlay("rayservice"), "RayService")


def as_rayservice(base: str, folder: Path) -> tuple[Manifest, ...]:
    """Another overlay with its RayCluster made a RayService, as the README says."""
    up = os.path.relpath(K8S, folder)
    lines = {
        "resources": [f"{up}/overlays/{base}"],
        "components": [f"{up}/components/rayservice"],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    return tuple(render(folder))


BROKEN: list[Callable[[Manifest], object]] = [
    lambda m: m["spec"].update(rayClusterSpec={}),
    lambda m: m["spec"].pop("rayClusterConfig"),
    lambda m: m["spec"]["upgradeStrategy"].update(type="Rolling"),
    lambda m: m["spec"].update(serveConfigV2="applications: 7"),
    lambda m: m["spec"].update(serveConfigV2="applications: [{name: disagg}]"),
    lambda m: m["spec"].update(serveConfigV2="aplications: []\napplications: []"),
    lambda m: m["spec"].update(serveConfigV2="applications: []\nproxy_location: Nowhere"),
    lambda m: m["spec"]["serveService"]["spec"]["ports"][0].update(port="serve"),
    lambda m: m["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"),
    lambda m: m["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(pods=1),
]


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_one_is_refused(change: Callable[[Manifest], object]) -> None:
    broken = copy.deepcopy(rayservice())
    change(broken)
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validate(broken)


@pytest.mark.skipif(not CRD, reason="DISAGG_TEST_KUBERAY_CRD does not name KubeRay's CRD")
def test_the_crd_of_the_raycluster_accepts_its_part() -> None:
    validator = jsonschema.Draft202012Validator(crd_schema(Path(CRD)))
    assert [error.message for error in validator.iter_errors(raycluster_of(rayservice()))] == []
    broken = copy.deepcopy(rayservice())
    BROKEN[-1](broken)
    assert not validator.is_valid(raycluster_of(broken))


@pytest.mark.parametrize("base", ["cpu", "production"])
def test_it_is_the_raycluster_of_the_overlay_but_for_the_supervisor(
    base: str, tmp_path: Path
) -> None:
    made = as_rayservice(base, tmp_path)
    for manifest in made:
        validate(manifest)
    others = {(one["kind"], one["metadata"]["name"]) for one in made} - {("RayService", "disagg")}
    before = {(one["kind"], one["metadata"]["name"]) for one in overlay(base)}
    added = {("NetworkPolicy", "disagg-ray-operator")}
    assert others == before - {("RayCluster", "disagg")} | added

    was = copy.deepcopy(of_kind(overlay(base), "RayCluster")["spec"])
    now = copy.deepcopy(of_kind(made, "RayService")["spec"]["rayClusterConfig"])
    head_was, head_now = (one["headGroupSpec"]["template"]["spec"] for one in (was, now))
    ray, supervisor = head_was.pop("containers")
    (container,) = head_now.pop("containers")
    assert head_was.pop("shareProcessNamespace") is True
    # Ray's container has all that the supervisor had; KubeRay gives it the token of the cluster.
    own = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    wanted = [one for one in supervisor["env"] if one["name"] not in own] + ray["env"] + [PREFIX]
    assert sorted(container.pop("env"), key=str) == sorted(wanted, key=str)
    assert container.pop("volumeMounts") == supervisor["volumeMounts"]
    del ray["env"], ray["volumeMounts"]
    assert container == ray
    for group in now["workerGroupSpecs"]:
        del group["template"]["spec"]["containers"][0]["readinessProbe"]
    assert now == was


def test_a_component_that_comes_too_late_is_noticed(tmp_path: Path) -> None:
    """It would do nothing, in silence: so it is said to come last."""
    up = os.path.relpath(K8S, tmp_path)
    names = ("rayservice", "gpu", "image")
    lines = {
        "resources": [f"{up}/base"],
        "components": [f"{up}/components/{name}" for name in names],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    late = of_kind(tuple(render(tmp_path)), "RayService")["spec"]["rayClusterConfig"]
    assert "nvidia.com/gpu" not in str(late)
    assert "Patches of one that" in (K8S / "components/rayservice/kustomization.yaml").read_text()


def serve_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(rayservice()["spec"]["serveConfigV2"])
    return found


def test_the_application_is_there_and_its_settings_are_mounted() -> None:
    config = ServeDeploySchema.model_validate(serve_config())
    (application,) = config.applications
    module, _, name = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is fleet
    assert application.route_prefix is None
    assert config.proxy_location.value == "Disabled"
    # On every pod of Ray: wherever Serve imports the application.
    path = Path(application.args["config"])
    for template in (
        rayservice()["spec"]["rayClusterConfig"]["headGroupSpec"],
        *rayservice()["spec"]["rayClusterConfig"]["workerGroupSpecs"],
    ):
        spec = template["template"]["spec"]
        mounted = {one["mountPath"]: one["name"] for one in spec["containers"][0]["volumeMounts"]}
        (volume,) = [one for one in spec["volumes"] if one["name"] == mounted[str(path.parent)]]
        assert volume["configMap"] == {"name": "disagg-config"}
    assert (K8S / "base" / path.name).is_file()


def test_the_application_is_built_of_those_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"config": str(K8S / "base/disagg.yaml")}
    monkeypatch.setenv(PREFIX_VARIABLE, "disagg-x7k2p")
    built = fleet(args)
    assert isinstance(built, serve.Application)
    with pytest.raises(ConfigError, match=r"cluster\.num_decode"):
        fleet(args | {"set": {"cluster.num_decode": -1}})
    with pytest.raises(ConfigError, match="config: which file"):
        fleet({})
    found = read_settings(args["config"], {PREFIX_VARIABLE: "disagg-x7k2p"}).settings
    assert found.cluster.worker_id_prefix == "disagg-x7k2p"


def test_the_old_cluster_goes_after_the_routers_have_found_the_new_one() -> None:
    delay_s = rayservice()["spec"]["rayClusterDeletionDelaySeconds"]
    assert delay_s * 1000 > 2 * SETTINGS.cluster.discovery_ms


def test_the_service_that_kuberay_wants_is_that_of_the_workers() -> None:
    spec = rayservice()["spec"]["serveService"]["spec"]
    (port,) = spec["ports"]
    assert port == {"name": "serve", "port": int(SETTINGS.worker.port)}  # KubeRay asks for the name
    assert spec["clusterIP"] == "None"
    assert rayservice()["spec"]["excludeHeadPodFromServeSvc"] is True


def test_pods_of_workers_are_not_asked_for_a_proxy() -> None:
    pages = inspect.getsource(healthz_agent)
    for group in rayservice()["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        asked = container["readinessProbe"]["httpGet"]
        assert str(asked["port"]) == group["rayStartParams"]["dashboard-agent-listen-port"]
        assert f'"{asked["path"]}"' in pages


def test_the_operator_reaches_the_dashboard_and_nothing_else() -> None:
    policy = of_kind(overlay("rayservice"), "NetworkPolicy", "disagg-ray-operator")["spec"]
    head = rayservice()["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert policy["podSelector"]["matchLabels"] == head["template"]["metadata"]["labels"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": int(head["rayStartParams"]["dashboard-port"])}]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"]
    assert rayservice()["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
