"""The Kubernetes API that tests play grants what KubeRay's role may do, and refuses all else."""

import json
from typing import Any

import jsonschema
import pytest

from tests.hosts.kuberay import desired_pods
from tests.hosts.kubernetes_api import JSON_PATCH, MERGE_PATCH, KubernetesApi, RefusedError

CLUSTER = "/apis/ray.io/v1/namespaces/default/rayclusters/disagg"
PODS = "/api/v1/namespaces/default/pods"
REPLICAS = "/spec/workerGroupSpecs/0/replicas"
TOKEN = {"authorization": "Bearer secret"}


def check(cluster: dict[str, Any]) -> None:
    number = {"type": "integer"}
    for group in cluster["spec"]["workerGroupSpecs"]:
        jsonschema.validate(group["replicas"], number)


@pytest.fixture
def api() -> KubernetesApi:
    made = KubernetesApi("default", "secret", check)
    spec = {"workerGroupSpecs": [{"groupName": "decode", "minReplicas": 1, "maxReplicas": 2}]}
    made.put("rayclusters", {"metadata": {"name": "disagg"}, "spec": spec})
    labels = {"ray.io/cluster": "disagg"}
    made.put("pods", {"metadata": {"name": "head", "labels": labels}})
    return made


def patch(api: KubernetesApi, body: Any, content_type: str = JSON_PATCH) -> dict[str, Any]:
    headers = TOKEN | {"content-type": content_type}
    return api.answer("PATCH", CLUSTER, headers, json.dumps(body).encode())


def replace(path: str, value: Any) -> list[dict[str, Any]]:
    return [{"op": "replace", "path": path, "value": value}]


def test_what_the_autoscaler_does_is_done(api: KubernetesApi) -> None:
    (group,) = api.answer("GET", CLUSTER, TOKEN, b"")["spec"]["workerGroupSpecs"]
    assert (group["replicas"], desired_pods(group)) == (0, 1)  # the CRD's default, the bound
    for replicas, num_pods in ((2, 2), (3, 2)):
        patched = patch(api, replace(REPLICAS, replicas))
        (group,) = patched["spec"]["workerGroupSpecs"]
        assert (group["replicas"], desired_pods(group)) == (replicas, num_pods)
    # A member that is not there is made, as Kubernetes does.
    gone = {"workersToDelete": ["a"]}
    (group,) = patch(api, replace("/spec/workerGroupSpecs/0/scaleStrategy", gone))["spec"][
        "workerGroupSpecs"
    ]
    assert group["scaleStrategy"] == gone
    version = api.get("rayclusters", "disagg")["metadata"]["resourceVersion"]
    guard = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    patch(api, [guard, *replace(REPLICAS, 1)])
    with pytest.raises(RefusedError, match="422"):  # it is another one now
        patch(api, [guard, *replace(REPLICAS, 2)])
    query = "?labelSelector=ray.io/cluster%3D{}&resourceVersion=1&resourceVersionMatch=NotOlderThan"
    assert len(api.answer("GET", PODS + query.format("disagg"), TOKEN, b"")["items"]) == 1
    assert api.answer("GET", PODS + query.format("other"), TOKEN, b"")["items"] == []


@pytest.mark.parametrize(
    ("method", "url", "headers", "status"),
    [
        ("GET", CLUSTER, {}, 401),
        ("GET", CLUSTER, {"authorization": "Bearer other"}, 401),
        ("GET", CLUSTER.replace("v1/", "v1beta1/"), TOKEN, 404),
        ("GET", CLUSTER.replace("disagg", "other"), TOKEN, 404),
        ("GET", CLUSTER.replace("default", "other"), TOKEN, 403),
        ("GET", CLUSTER.removesuffix("/disagg"), TOKEN, 403),
        ("DELETE", CLUSTER, TOKEN, 403),
        ("DELETE", f"{PODS}/head", TOKEN, 403),
        ("GET", f"{PODS}?fieldSelector=a", TOKEN, 400),
        ("GET", f"{PODS}?resourceVersion=999999", TOKEN, 504),
    ],
)
def test_who_asks_otherwise_is_refused(
    api: KubernetesApi, method: str, url: str, headers: dict[str, str], status: int
) -> None:
    with pytest.raises(RefusedError) as refused:
        api.answer(method, url, headers, b"")
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (replace(REPLICAS, 1), "application/json", 415),
        (replace(REPLICAS, 1), "application/strategic-merge-patch+json", 415),
        (replace(REPLICAS, "1"), JSON_PATCH, 422),
        (replace("/spec/workerGroupSpecs/1/replicas", 1), JSON_PATCH, 422),
        (replace("/specs/workerGroupSpecs/0/replicas", 1), JSON_PATCH, 422),
        ({"op": "replace"}, JSON_PATCH, 400),
        ({"metadata": {"resourceVersion": "1"}}, MERGE_PATCH, 409),
    ],
)
def test_a_patch_that_does_not_fit_changes_nothing(
    api: KubernetesApi, body: Any, content_type: str, status: int
) -> None:
    before = api.get("rayclusters", "disagg")
    with pytest.raises(RefusedError) as refused:
        patch(api, body, content_type)
    assert refused.value.status == status
    assert api.get("rayclusters", "disagg") == before
