"""Ray's autoscaler for KubeRay, both versions, decides about `k8s/` as it is rendered.

The decisions are Ray's own code, what it writes goes to the API of `tests/hosts/kubernetes_api.py`.
"""

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import (
    ResourceDemandScheduler as SchedulerV1,
)
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import (
    KubeRayProvider,
)
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from disagg.cluster.placement import place_workers, role_resources
from disagg.config import Settings
from tests.hosts.kuberay import NAMESPACE, desired_pods, find_group, make_worker_pod
from tests.hosts.kubernetes_api import JSON_PATCH, KubernetesApi, RefusedError
from tests.unit.launch.rendered import Manifest, needs_kustomize, of_kind, overlay
from tests.unit.launch.schemas import crd_schema

pytestmark = needs_kustomize

OVERLAYS = ("autoscaling", "production")
MOST = 16
Decision = tuple[dict[str, int], int]
CRD = os.environ.get("DISAGG_TEST_KUBERAY_CRD", "")


class Client:
    """What Ray sends to Kubernetes, with the same answers."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    def get(self, path: str) -> Manifest:
        return self._ask("GET", path, b"", "")

    def patch(self, path: str, payload: Any, content_type: str = JSON_PATCH) -> Manifest:
        return self._ask("PATCH", path, json.dumps(payload).encode(), content_type)

    def _ask(self, method: str, path: str, body: bytes, content_type: str) -> Manifest:
        group = "/api/v1" if path.startswith("pods") else "/apis/ray.io/v1"
        headers = {"authorization": "Bearer secret", "content-type": content_type}
        return self._api.answer(method, f"{group}/namespaces/{NAMESPACE}/{path}", headers, body)


def applied(name: str, edit: Callable[[Manifest], None] = lambda _: None) -> KubernetesApi:
    """The API with an overlay's RayCluster, edited before."""
    schema = crd_schema(Path(CRD)) if CRD else {}
    api = KubernetesApi(NAMESPACE, "secret", jsonschema.Draft202012Validator(schema).validate)
    cluster = copy.deepcopy(of_kind(overlay(name), "RayCluster"))
    edit(cluster)
    api.put("rayclusters", cluster)
    return api


def config_of(api: KubernetesApi) -> dict[str, Any]:
    """What both versions make of it."""
    cluster = api.get("rayclusters", "disagg")
    return dict(autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster))


def needs_of(name: str, role: str) -> dict[str, float]:
    """What a worker waits for in Ray, with the settings of an overlay and of its supervisor."""
    made = overlay(name)
    settings = yaml.safe_load(of_kind(made, "ConfigMap", "disagg-config")["data"]["disagg.yaml"])
    head = of_kind(made, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]
    (supervisor,) = [one for one in head["containers"] if one["name"] == "disagg-workers"]
    device = [one["value"] for one in supervisor["env"] if one["name"] == "DISAGG_WORKER__DEVICE"]
    settings["worker"]["device"] = device[0] if device else "auto"
    read = Settings.model_validate(settings)
    asked = {
        "CPU": read.cluster.num_cpus_per_worker,
        "GPU": place_workers(read, ()).num_gpus,
        **role_resources(read, role),
    }
    return {resource: amount for resource, amount in asked.items() if amount}


def decide_v2(config: dict[str, Any], waiting: list[dict[str, float]]) -> Decision:
    """Pods to be launched where there is none, by group, and how many workers get none."""
    read = AutoscalingConfig(config, skip_content_hash=True)
    requests = [ResourceRequestUtil.make(one) for one in waiting]
    reply = ResourceDemandScheduler(cast(AutoscalerEventLogger, None)).schedule(
        SchedulingRequest(
            disable_launch_config_check=read.disable_launch_config_check(),
            node_type_configs=read.get_node_type_configs(),
            max_num_nodes=read.get_max_num_nodes(),
            idle_timeout_s=read.get_idle_timeout_s(),
            resource_requests=ResourceRequestUtil.group_by_count(requests),
        )
    )
    launched: Counter[str] = Counter()
    for one in reply.to_launch:
        launched[one.instance_type] += one.count
    del launched["headgroup"]
    return dict(launched), len(reply.infeasible_resource_requests)


def decide_v1(config: dict[str, Any], waiting: list[dict[str, float]]) -> Decision:
    """The same."""
    of_kuberay = ("available_node_types", "max_workers", "head_node_type", "upscaling_speed")
    scheduler = SchedulerV1(cast(Any, None), *(config[name] for name in of_kuberay))
    launched, left = scheduler.get_nodes_to_launch(
        nodes=[],
        launching_nodes={},
        resource_demands=cast(Any, waiting),
        unused_resources_by_ip={},
        pending_placement_groups=[],
        max_resources_by_ip={},
        ensure_min_cluster_size=[],
        node_availability_summary=NodeAvailabilitySummary({}),
    )
    return {name: count for name, count in launched.items() if name != "headgroup"}, len(left)


DECIDE = {"v1": decide_v1, "v2": decide_v2}


@pytest.mark.parametrize("version", DECIDE)
@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_for_each_worker_that_waits(name: str, version: str) -> None:
    config = config_of(applied(name))
    prefill, decode = needs_of(name, "prefill"), needs_of(name, "decode")
    assert ("GPU" in decode) == (name == "production")
    decide = DECIDE[version]
    assert decide(config, []) == ({"prefill": 1, "decode": 1}, 0)
    assert decide(config, [prefill, decode]) == ({"prefill": 1, "decode": 1}, 0)
    assert decide(config, [prefill, *[decode] * 3]) == ({"prefill": 1, "decode": 3}, 0)
    # And no more than the group may have.
    too_many = [decode] * (MOST + 2)
    assert decide(config, too_many) == ({"prefill": 1, "decode": MOST}, 2)
    assert config["idle_timeout_minutes"] == 10


@pytest.mark.parametrize("version", DECIDE)
def test_a_misspelt_resource_gets_no_pod(version: str) -> None:
    def misspell(cluster: Manifest) -> None:
        parameters = cluster["spec"]["workerGroupSpecs"][1]["rayStartParams"]
        parameters["resources"] = parameters["resources"].replace("disagg_decode", "disagg_decoed")

    config = config_of(applied("autoscaling", misspell))
    decode = needs_of("autoscaling", "decode")
    assert DECIDE[version](config, [decode] * 3) == ({"prefill": 1, "decode": 1}, 3)


def test_what_it_writes_is_granted_and_makes_the_pods() -> None:
    api = applied("autoscaling")
    provider = KubeRayProvider(
        "disagg", {"namespace": NAMESPACE}, cast(Any, None), cast(Any, Client(api))
    )

    def pods(group: str) -> list[str]:
        """Names of the pods that there are, after the operator has made what was missing."""
        there = [one["metadata"]["name"] for one in api.find_all("pods") if group in str(one)]
        cluster = api.get("rayclusters", "disagg")
        for _ in range(desired_pods(find_group(cluster, group)) - len(there)):
            pod = make_worker_pod(cluster, group)
            api.put("pods", pod)
            there.append(pod["metadata"]["name"])
        return there

    assert len(pods("decode")) == 1
    provider.launch({"decode": 1}, "first")
    first, second = pods("decode")
    assert provider.get_non_terminated().keys() == {first, second}
    provider.launch({"decode": MOST}, "too many")
    assert find_group(api.get("rayclusters", "disagg"), "decode")["replicas"] == MOST
    provider.terminate([second], "second")
    group = find_group(api.get("rayclusters", "disagg"), "decode")
    assert group["scaleStrategy"] == {"workersToDelete": [second]}
    assert group["replicas"] == MOST - 1
    (error,) = provider.poll_errors()
    assert str(error).endswith("Launch capped by maxReplicas limit.")


def test_resources_that_the_operator_cannot_read_are_refused() -> None:
    def escape(cluster: Manifest) -> None:
        parameters = cluster["spec"]["workerGroupSpecs"][1]["rayStartParams"]
        parameters["resources"] = '"{\\"disagg_decode\\": 1}"'  # as many write it

    cluster = applied("production", escape).get("rayclusters", "disagg")
    with pytest.raises(ValueError, match="Expecting property name"):
        make_worker_pod(cluster, "decode")
    (started,) = make_worker_pod(applied("production").get("rayclusters", "disagg"), "decode")[
        "spec"
    ]["containers"][0]["args"]
    assert "--num-gpus=1 " in started


def test_a_cluster_that_does_not_fit_is_refused() -> None:
    if not CRD:
        pytest.skip("DISAGG_TEST_KUBERAY_CRD does not name KubeRay's CRD")
    with pytest.raises(RefusedError, match="422"):
        applied("autoscaling", lambda cluster: cluster["spec"].update(enableAutoscaling=True))
