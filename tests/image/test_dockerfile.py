"""The Dockerfile fits the repository, and what is started from the image is in it."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.image.dockerfile import Dockerfile, DockerfileError, ignores, parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
FILE = parse(TEXT)
IGNORED = (ROOT / ".dockerignore").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def runs(dockerfile: Dockerfile, target: str) -> str:
    """All RUN of a target and of what it is made of."""
    return "\n".join(
        one.text for stage in dockerfile.needed(target) for one in stage.instructions
        if one.name == "RUN"
    )  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_is_copied_is_there_and_not_kept_out(target: str) -> None:
    for stage in FILE.needed(target):
        for one in stage.instructions:
            if one.name == "COPY" and not one.copied()[0]:
                for source in one.copied()[1]:
                    assert (ROOT / source).exists()
                    assert not ignores(IGNORED, source)


@pytest.mark.parametrize("path", [".venv", ".git", "keys.json", "tests", "disagg/__pycache__"])
def test_nothing_else_enters_the_image(path: str) -> None:
    assert ignores(IGNORED, path)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_it_runs_as_the_user_of_the_pods(target: str) -> None:
    uid, gid = FILE.setting(target, "USER").split(":")
    router = next(yaml.safe_load_all((ROOT / "k8s/base/router.yaml").read_text()))
    context = router["spec"]["template"]["spec"]["securityContext"]
    assert (int(uid), int(gid)) == (context["runAsUser"], context["runAsGroup"])
    assert f"useradd --uid {uid} --gid {gid}" in runs(FILE, target)
    assert FILE.environment(target)["PATH"].split(":")[0] == "/opt/disagg/bin"


def test_torch_is_the_build_that_is_tested() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (tested,) = re.findall(r"^TORCH\s*:= (\S+)$", makefile, re.MULTILINE)
    (index,) = re.findall(r"^CPU_INDEX\s*:= (\S+)$", makefile, re.MULTILINE)
    for name in ("build-cpu", "build-cuda"):
        given = [one.assignments() for one in FILE.stages[name].instructions if one.name == "ARG"]
        assert {"TORCH": tested} in given
    assert "TORCH_INDEX=" + index in TEXT


def test_extras_are_those_of_the_project() -> None:
    for target, wanted in (
        ("cpu", {"tracing", "object", "kuberay"}),
        ("cuda", {"tracing", "object", "kuberay", "vllm"}),
    ):
        found = re.search(r"'\.\[([a-z,]+)\]'", runs(FILE, target))
        assert found is not None
        assert set(found[1].split(",")) == wanted
        assert wanted <= PROJECT["optional-dependencies"].keys()


def test_a_build_without_a_target_makes_the_one_for_the_cpu() -> None:
    assert list(FILE.stages)[-1] == "cpu"
    assert [stage.name for stage in FILE.needed("cpu")] == ["base", "build", "build-cpu", "cpu"]
    assert "vllm" not in runs(FILE, "cpu")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("FROM base AS build\n", "FROM bases AS build\n", "bases is no stage"),
        ("--from=build-cpu ", "--from=build-gpu ", "build-gpu, which is no stage"),
        ("USER 1000:1000", "VOLUME /data", "VOLUME is not known"),
        ("FROM base AS cpu", "FROM base AS cuda", "two stages cuda"),
        ("ARG BASE=debian:bookworm-slim\n", "", r"\$BASE has no value"),
        ("COPY disagg disagg", "COPY disagg", "sources by name"),
    ],
)
def test_a_broken_dockerfile_is_refused(before: str, after: str, reason: str) -> None:
    assert before in TEXT
    with pytest.raises(DockerfileError, match=reason):
        parse(TEXT.replace(before, after))
