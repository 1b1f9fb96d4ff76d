"""What kustomize makes of the folders of k8s/, by kubectl or kustomize, whichever is there."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

K8S = Path(__file__).parents[3] / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMMAND = next(
    (
        words
        for words in (["kubectl", "kustomize"], ["kustomize", "build"])
        if shutil.which(words[0])
    ),
    None,
)
needs_kustomize = pytest.mark.skipif(
    COMMAND is None, reason="neither kubectl nor kustomize is here"
)
BOUND_S = 300


def render(folder: Path) -> list[Manifest]:
    """All objects of a folder with a kustomization.

    Raises:
        AssertionError: kustomize refuses it; its words.
    """
    assert COMMAND is not None
    run = subprocess.run(
        [*COMMAND, str(folder)], capture_output=True, text=True, check=False, timeout=BOUND_S
    )
    assert run.returncode == 0, run.stderr
    return [manifest for manifest in yaml.safe_load_all(run.stdout) if manifest]


@cache
def overlay(name: str) -> tuple[Manifest, ...]:
    """All objects of one of the overlays."""
    return tuple(render(K8S / "overlays" / name))


def of_kind(manifests: tuple[Manifest, ...], kind: str, name: str = "") -> Manifest:
    """The one object of a kind, or of a kind and name."""
    (found,) = [
        one for one in manifests if one["kind"] == kind and name in ("", one["metadata"]["name"])
    ]
    return found


def raycluster_of(rayservice: Manifest) -> Manifest:
    """A RayCluster as KubeRay makes it of a RayService, but for its own name."""
    spec = rayservice["spec"]["rayClusterConfig"]
    return rayservice | {"kind": "RayCluster", "spec": spec}


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """The pods that an object makes: labels and spec."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "RayService":
        return pod_templates(raycluster_of(manifest))
    if manifest["kind"] == "RayCluster":
        groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
        return [group["template"] for group in groups]
    return [spec["template"]] if "template" in spec else []
