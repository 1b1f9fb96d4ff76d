"""The image is built and run: by a builder where there is one, else step by step in namespaces."""

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.image.dockerfile import parse
from tests.image.namespace_build import (
    NamespaceBuild,
    StepError,
    UnavailableError,
    require_permission,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BOUND_S = 7000
TAG = "disagg-test:cpu"
BUNDLE = "/run/authorities.crt"
Run = Callable[[str], str]
"""Runs a line of shell in the image, as its user, its root read-only; raises where it fails."""


def builder() -> str:
    """A container builder that answers; "" where there is none."""
    for name in ("docker", "podman"):
        if shutil.which(name):
            asked = subprocess.run([name, "info"], capture_output=True, timeout=60, check=False)
            if asked.returncode == 0:
                return name
    return ""


def pip_variables() -> dict[str, str]:
    """How pip is set up here: mirrors and folders of wheels."""
    listed = subprocess.run(
        ["pip", "config", "list"], capture_output=True, text=True, check=False, timeout=120
    ).stdout
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        variable = name.rpartition(".")[2].upper().replace("-", "_")
        found[f"PIP_{variable}"] = value.strip("'\"")
    found |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return found


def shown_to_steps(variables: dict[str, str]) -> dict[Path, str]:
    """Folders of wheels as they are; the authorities that are trusted here, where none lie yet."""
    if bundle := variables.get("PIP_CERT"):
        variables["PIP_CERT"] = BUNDLE
        return {Path(bundle): BUNDLE} | local_folders(variables)
    return local_folders(variables)


def local_folders(variables: dict[str, str]) -> dict[Path, str]:
    """Folders that pip's variables name, by their first two parts."""
    words = [word.removeprefix("file://") for text in variables.values() for word in text.split()]
    folders = {Path("/", *Path(word).parts[1:3]) for word in words if word.startswith("/")}
    return {folder: str(folder) for folder in folders if folder.is_dir()}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """The target cpu, built."""
    if name := builder():
        built = subprocess.run(
            [name, "build", "--target", "cpu", "--tag", TAG, str(ROOT)],
            timeout=BOUND_S,
            check=False,
        )
        assert built.returncode == 0

        def in_container(line: str) -> str:
            confined = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
            command = [name, "run", "--rm", *confined, TAG, "sh", "-ec", line]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                raise StepError(done.stdout + done.stderr)
            return done.stdout

        yield in_container
        return
    try:
        require_permission()
    except UnavailableError as error:
        pytest.skip(f"no container builder, and no namespaces: {error}")
    variables = pip_variables()
    dockerfile = parse((ROOT / "Dockerfile").read_text())
    shown = shown_to_steps(variables)
    with TemporaryDirectory(prefix="disagg-image-") as folder:  # gigabytes: not kept as others are
        build = NamespaceBuild(dockerfile, ROOT, Path(folder), {}, shown, variables)
        build.build("cpu")
        user = dockerfile.setting("cpu", "USER")
        yield lambda line: build.run("cpu", user, line, {})


def test_what_pods_start_is_there(run: Run) -> None:
    assert run("disagg --version").split()[-1] == VERSION
    assert "version 2." in run("ray --version")
    run("command -v bash wget sleep python")


def test_it_runs_as_a_user_on_a_root_that_it_cannot_change(run: Run) -> None:
    assert run("id -u; id -g").split() == ["1000", "1000"]
    for path in ("/anything", "/opt/disagg/anything", "/home/disagg/anything"):
        with pytest.raises(StepError):
            run(f"touch {path}")
    run("touch /tmp/anything")


def test_router_and_worker_find_what_they_import(run: Run) -> None:
    told = run(
        "python -c 'import json, torch, nixl, ray, disagg.router.app, disagg.workers.actor;"
        " print(json.dumps([torch.__version__, torch.cuda.is_available()]))'"
    )
    version, has_cuda = json.loads(told.splitlines()[-1])
    assert version.startswith("2.13.0")
    assert not has_cuda


def test_no_code_comes_from_a_source_folder(run: Run) -> None:
    assert "/opt/disagg/lib" in run("python -c 'import disagg; print(disagg.__file__)'")
    with pytest.raises(StepError):
        run("test -e /source")
    with pytest.raises(StepError):
        run("python -c 'import tests'")


HEAD = """
ray start --head --block --node-ip-address=127.0.0.1 --num-cpus=0 --include-dashboard=true \\
  --port=26399 --dashboard-port=28299 --dashboard-agent-listen-port=25299 --disable-usage-stats \\
  --temp-dir=/tmp/ray-of-test >/tmp/head.log 2>&1 &
head=$!
for second in $(seq 240); do
  wget -q -O- http://127.0.0.1:25299/api/healthz && break
  kill -0 $head || { cat /tmp/head.log; exit 1; }
  sleep 1
done
kill $head
wait $head || true
"""


def test_a_head_starts_and_answers_what_kuberays_probes_ask(run: Run) -> None:
    """Ray without its extra "default" starts no dashboard, and its agents answer nothing."""
    assert "raylet: success" in run(HEAD)
