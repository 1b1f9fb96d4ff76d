"""Schemas of what k8s/ holds: Kubernetes' own, CRDs, and what we rely on of custom resources."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.unit.launch.rendered import Manifest, raycluster_of

VERSION = "1.32"

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_RAYCLUSTER_SCHEMA: Manifest = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": {"type": "string"},
                "authOptions": {
                    "additionalProperties": False,
                    "properties": {"mode": {"enum": ["disabled", "token"]}},
                },
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {
                    "additionalProperties": False,
                    "properties": {
                        "idleTimeoutSeconds": {"type": "integer", "minimum": 0},
                        "resources": {"type": "object"},
                        "securityContext": {"type": "object"},
                        "volumeMounts": {"type": "array", "items": {"required": ["mountPath"]}},
                    },
                },
                "gcsFaultToleranceOptions": {
                    "additionalProperties": False,
                    "required": ["redisAddress"],
                    "properties": {
                        "redisAddress": {"type": "string", "pattern": "^rediss?://"},
                        "redisPassword": {
                            "additionalProperties": False,
                            "properties": {"valueFrom": {"type": "object"}},
                        },
                    },
                },
                "headGroupSpec": {
                    "additionalProperties": False,
                    "required": ["template"],
                    "properties": {"rayStartParams": _TEXTS, "template": {"type": "object"}},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "additionalProperties": False,
                        "required": ["groupName", "minReplicas", "maxReplicas", "template"],
                        "properties": {
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer"},
                            "minReplicas": {"type": "integer"},
                            "maxReplicas": {"type": "integer"},
                            "rayStartParams": _TEXTS,
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}


def validate_raycluster(manifest: Manifest) -> None:
    """Hold a RayCluster against our reading of it, its pods against Kubernetes' schema.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    jsonschema.validate(manifest, _RAYCLUSTER_SCHEMA)
    spec = manifest["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(group["template"])}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def _closed(required: list[str], **properties: Any) -> Manifest:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


def _resource(version: str, kind: str, spec: Manifest) -> Manifest:
    return _closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata={"type": "object", "required": ["name"]},
        spec=spec,
    )


_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_NAME = {"type": "string", "minLength": 1}
_SELECTOR = _closed(["matchLabels"], matchLabels=_TEXTS)
_AUTHORIZATION = _closed(
    ["type", "credentials"],
    type={"const": "Bearer"},
    credentials=_closed(["name", "key"], name=_NAME, key=_NAME),
)
_ENDPOINT = _closed(
    ["port", "path"],
    port=_NAME,
    path={"type": "string", "pattern": "^/"},
    interval={"type": "string", "pattern": "^[0-9]+s$"},
    authorization=_AUTHORIZATION,
)
_ROUTE_RULE = _closed(
    ["backendRefs"],
    matches={"type": "array"},
    backendRefs={"type": "array", "items": _closed(["name"], group={}, kind={}, name=_NAME)},
    timeouts=_closed([], request={"type": "string"}),
)
OWN_SCHEMAS = {
    "RayCluster": _RAYCLUSTER_SCHEMA,
    "RayService": _resource(
        "ray.io/v1",
        "RayService",
        _closed(
            ["serveConfigV2", "rayClusterConfig"],
            upgradeStrategy=_closed(["type"], type={"enum": ["NewCluster", "None"]}),
            rayClusterDeletionDelaySeconds={"type": "integer", "minimum": 0},
            excludeHeadPodFromServeSvc={"type": "boolean"},
            serveService=_closed(["spec"], spec={"type": "object"}),
            serveConfigV2={"type": "string"},
            rayClusterConfig=_RAYCLUSTER_SCHEMA["properties"]["spec"],
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _closed(
            ["selector", "podMetricsEndpoints"],
            selector=_SELECTOR,
            podMetricsEndpoints={"type": "array", "minItems": 1, "items": _ENDPOINT},
        ),
    ),
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _closed(
            ["selector", "targetPorts", "endpointPickerRef"],
            selector=_SELECTOR,
            targetPorts={"type": "array", "items": _closed(["number"], number=_PORT)},
            endpointPickerRef=_closed(
                ["name", "port"],
                name=_NAME,
                port=_closed(["number"], number=_PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "HTTPRoute": _resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _closed(
            ["parentRefs", "rules"],
            parentRefs={"type": "array", "items": _closed(["name"], name=_NAME)},
            rules={"type": "array", "items": _ROUTE_RULE},
        ),
    ),
}
"""Custom resources, in our words; their CRDs are not part of this project."""


def validate(manifest: Manifest) -> None:
    """Hold any object of k8s/ against its schema.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    if manifest["kind"] == "RayCluster":
        validate_raycluster(manifest)
    elif manifest["kind"] == "RayService":
        validate_rayservice(manifest)
    elif manifest["kind"] in OWN_SCHEMAS:
        jsonschema.validate(manifest, OWN_SCHEMAS[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def validate_rayservice(manifest: Manifest) -> None:
    """Hold a RayService against our reading of it, and its parts against their own schemas.

    Raises:
        jsonschema.ValidationError: it, its RayCluster or its Service does not fit.
        ValueError: Ray refuses its Serve configuration, or would ignore a part of it.
    """
    jsonschema.validate(manifest, OWN_SCHEMAS["RayService"])
    validate_raycluster(raycluster_of(manifest))
    spec = manifest["spec"]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    kubernetes_validate.validate(service | spec["serveService"], VERSION, strict=True)
    validate_serve_config(spec["serveConfigV2"])


def validate_serve_config(text: str) -> None:
    """Hold Serve's configuration against Ray's own schema, which ignores what it does not know.

    Raises:
        ValueError: it does not fit, or has a key that is unknown.
    """
    given = yaml.safe_load(text)
    config = ServeDeploySchema.model_validate(given)
    unknown = given.keys() - ServeDeploySchema.model_fields.keys()
    for given_one, one in zip(given["applications"], config.applications, strict=True):
        unknown |= given_one.keys() - type(one).model_fields.keys()
    if unknown:
        raise ValueError(f"Serve does not know {sorted(unknown)}")


def crd_schemas(folder: Path) -> dict[str, Manifest]:
    """By kind, the schemas of all CRDs in a folder."""
    return {
        _read_crd(path)["spec"]["names"]["kind"]: crd_schema(path)
        for path in sorted(folder.glob("*.yaml"))
    }


def _read_crd(path: Path) -> Manifest:
    crd: Manifest = yaml.load(
        path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return crd


def crd_schema(path: Path) -> Manifest:
    """The v1 schema of a CRD, closed: what the API server would drop in silence is an error."""
    crd = _read_crd(path)
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    schema: Manifest = version["schema"]["openAPIV3Schema"]
    rest: list[Any] = [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest += node
        elif isinstance(node, dict):
            rest += node.values()
            open_kind = node.get("x-kubernetes-preserve-unknown-fields")
            if isinstance(node.get("properties"), dict) and "type" in node and not open_kind:
                node.setdefault("additionalProperties", False)
            if node.get("x-kubernetes-int-or-string") is True:
                node.pop("type", None)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema
