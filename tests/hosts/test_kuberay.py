"""`k8s/overlays/autoscaling` as it is rendered, scaled by Ray's own autoscaler for KubeRay.

Real are Ray, its autoscaler, disagg and every request. Played are Kubernetes and KubeRay's
operator: `kube_cluster.py`. The tests are steps of one life and run in their order, once as the
overlay is and once with version 1 of the autoscaler.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.checkpoints import make_checkpoint, reference_generate
from tests.hosts.fleet import make_environment
from tests.hosts.hosts import hosts
from tests.hosts.kube_cluster import BOUND_S, KubeCluster, Manifest
from tests.unit.launch.rendered import needs_kustomize, overlay
from tests.unit.launch.schemas import crd_schema

pytestmark = [pytest.mark.timeout(5000), needs_kustomize]

CRD = os.environ.get("DISAGG_TEST_KUBERAY_CRD", "")
NUM_HOSTS = 9
MAX_REPLICAS = 2
LOOKS = 6
"""After so many looks the autoscaler has decided."""
NUM_TOKENS = 24
GAP_MIN = 1e-3
SUPERVISOR = "disagg-workers"


def wait_for(state: Callable[[], Any], what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (found := state()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)
    return found


def edit_settings(text: str, model_dir: Path) -> str:
    """The edits that the file asks for, and the tiny model's own sizes."""
    for old, new in (
        ("dir: /models/my-model", f"dir: {model_dir}"),
        ("\nworker:\n", "\nworker:\n  num_blocks: 256\n"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def edit_cluster(cluster: Manifest, version: str | None) -> None:
    """What a user may set: bounds that a test reaches, an idle time that a test waits for.

    And no dashboard: only KubeRay's probes ask it, and it takes minutes of a busy machine.
    """
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["include-dashboard"] = "false"
    options = cluster["spec"]["autoscalerOptions"]
    options["idleTimeoutSeconds"] = 5
    if version is not None:
        options["version"] = version
    for group in cluster["spec"]["workerGroupSpecs"]:
        group["maxReplicas"] = MAX_REPLICAS


class Life:
    """The cluster, and one client of it."""

    def __init__(self, kube: KubeCluster, model_dir: Path) -> None:
        self.kube = kube
        self.prompt, self.right = self._choose(model_dir)

    def _choose(self, model_dir: Path) -> tuple[list[int], list[int]]:
        for first in range(50):
            prompt = [10 + (first + 7 * i) % 80 for i in range(70)]
            tokens, _, gap = reference_generate(model_dir, prompt, NUM_TOKENS)
            if gap > GAP_MIN:
                return prompt, tokens
        raise AssertionError("no prompt whose answer is clear")

    def said(self) -> str:
        """What the supervisor has said."""
        return self.kube.head.log_of(SUPERVISOR)

    def told(self) -> str:
        """All that helps to understand a failure."""
        pods = [
            (one["metadata"]["name"], one["status"].get("phase"), one["status"].get("podIP"))
            for one in self.kube.api.find_all("pods")
        ]
        logs = self.kube.head.log_of("autoscaler")[-3000:]
        return f"{pods}\n{self.kube.faults}\n{self.said()[-3000:]}\n{logs}"

    def wait_until(self, state: Callable[[], Any]) -> Any:
        return wait_for(state, self.told)

    def wait_said(self, pattern: str, since: int = 0) -> re.Match[str]:
        """Wait until the supervisor says something, after so many characters."""
        found = self.wait_until(lambda: re.search(pattern, self.said()[since:], re.MULTILINE))
        assert isinstance(found, re.Match)
        return found

    @property
    def num_pods(self) -> dict[str, int]:
        """Pods of each group of workers."""
        return {group: len(self.kube.pods(group)) for group in ("prefill", "decode")}

    def wait_pods(self, **wanted: int) -> None:
        """Wait until the groups have so many pods, and are to have so many."""
        self.wait_until(
            lambda: (
                self.num_pods == wanted
                and all(max(1, self.kube.group(one)["replicas"]) == wanted[one] for one in wanted)
            )
        )

    def wait_decided(self) -> None:
        """Wait until the autoscaler has looked at everything several times."""
        before = self.kube.num_looks
        self.wait_until(lambda: self.kube.num_looks >= before + LOOKS)

    def scale(self, *arguments: str) -> tuple[int, str]:
        """`disagg scale`, in the container of the supervisor."""
        config = ("--config", "/etc/disagg/disagg.yaml")
        return self.kube.head.execute(SUPERVISOR, ("disagg", "scale", *config, *arguments))

    def workers(self) -> dict[str, bool]:
        """Whether each worker is ready, as the router has it."""
        said = self._send("GET", f"http://{self.kube.front.address}:8001/v1/disagg/workers")
        views = said.json()["workers"] if said.status_code == 200 else []
        return {one["info"]["incarnation"]["worker_id"]: one["ready"] for one in views}

    def ask(self) -> tuple[int, Any]:
        """One request, sent once; its status, and whether its tokens are right."""
        body = {
            "model": "my-model",
            "prompt": self.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        said = self._send("POST", f"http://{self.kube.front.address}:8000/v1/completions", body)
        if said.status_code != 200:
            return said.status_code, said.text
        return 200, said.json()["choices"][0]["token_ids"] == self.right

    def _send(self, method: str, url: str, body: Any = None) -> httpx.Response:
        user = "client" if method == "POST" else "observer"
        headers = {"Authorization": f"Bearer {self.kube.key_of(user)}"}
        with self.kube.control.network():
            return httpx.request(
                method, url, json=body, headers=headers, timeout=BOUND_S, trust_env=False
            )

    def load(self) -> "Load":
        return Load(self)


class Load:
    """One request after the other, each sent once, while the block runs."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._done = threading.Event()
        self.answers: list[tuple[int, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(BOUND_S)

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self.answers.append(self._life.ask())
            except httpx.HTTPError as error:
                self.answers.append((0, repr(error)))

    @property
    def all_right(self) -> bool:
        return len(self.answers) > 0 and set(self.answers) == {(200, True)}


@pytest.fixture(scope="module", params=[None, "v1"], ids=["as-shipped", "v1"])
def life(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Life]:
    model_dir = make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")
    environment = make_environment(tmp_path_factory.mktemp("environment"))
    schema = crd_schema(Path(CRD)) if CRD else {}
    validator = jsonschema.Draft202012Validator(schema)
    objects = [dict(one) for one in overlay("autoscaling")]
    for one in objects:
        if one["kind"] == "ConfigMap" and "disagg.yaml" in one["data"]:
            one["data"] = {"disagg.yaml": edit_settings(one["data"]["disagg.yaml"], model_dir)}
        if one["kind"] == "RayCluster":
            edit_cluster(one, request.param)
    with hosts(NUM_HOSTS, tmp_path_factory.mktemp("keys"), [environment, model_dir]) as machines:
        folder = tmp_path_factory.mktemp("kube")
        kube = KubeCluster(machines, objects, environment, folder, validator.validate)
        try:
            kube.start()
            yield Life(kube, model_dir)
        finally:
            kube.end()


def test_the_least_number_of_pods_comes_without_being_asked_for(life: Life) -> None:
    life.wait_until(lambda: life.kube.pods("headgroup"))
    life.wait_said("all workers serve$")
    life.wait_pods(prefill=1, decode=1)
    life.wait_until(lambda: life.workers() == {"prefill-0": True, "decode-0": True})
    assert life.ask() == (200, True)


def test_one_more_worker_is_one_more_pod(life: Life) -> None:
    with life.load() as load:
        code, said = life.scale("--decode", "2")
        assert code == 0, said
        life.wait_until(lambda: life.workers().get("decode-1"))
    assert load.all_right, load.answers
    life.wait_pods(prefill=1, decode=2)


def test_a_pod_that_is_deleted_drains_first(life: Life) -> None:
    ip = re.findall(r"worker decode-1 serves(?: again)? on ([\d.]+):", life.said())[-1]
    (name,) = [
        one["metadata"]["name"] for one in life.kube.pods("decode") if one["status"]["podIP"] == ip
    ]
    since = len(life.said())
    with life.load() as load:
        life.kube.delete(name)
        life.wait_until(lambda: name in {pod.name for pod in life.kube.ended})
        life.wait_said("worker decode-1 serves again on (?!" + re.escape(ip) + ")", since)
        life.wait_until(lambda: life.workers().get("decode-1"))
    assert load.all_right, load.answers
    (ended,) = [pod for pod in life.kube.ended if pod.name == name]
    assert ended.hook_said["ray-worker"][0] == 0, ended.hook_said
    assert not re.search("(prefill-0|decode-0) serves again", life.said()[since:])


def test_never_more_than_the_groups_most(life: Life) -> None:
    since = len(life.said())
    assert life.scale("--decode", str(MAX_REPLICAS + 1), "--no-wait")[0] == 0
    life.wait_said(r"worker decode-2: finds no place: it needs CPU 1, disagg_decode 1", since)
    life.wait_decided()
    assert len(life.kube.pods("decode")) == MAX_REPLICAS
    code, said = life.scale()
    assert code == 0
    assert "decode-2 is to serve as decode: finds no place" in said
    assert life.ask() == (200, True)


def test_a_pod_without_a_node_harms_nobody_and_is_told(life: Life) -> None:
    since = len(life.said())
    life.kube.has_room = False

    def one_more(cluster: Manifest) -> None:
        cluster["spec"]["workerGroupSpecs"][1]["maxReplicas"] = MAX_REPLICAS + 1

    life.kube.apply(one_more)
    life.wait_until(lambda: life.kube.group("decode")["replicas"] == MAX_REPLICAS + 1)
    life.wait_decided()
    phases = sorted(one["status"]["phase"] for one in life.kube.pods("decode"))
    assert phases == ["Pending", "Running", "Running"]
    assert "decode-2 is to serve as decode: finds no place" in life.scale()[1]
    others = {"prefill-0": True, "decode-0": True, "decode-1": True}
    assert life.workers() == others
    assert life.ask() == (200, True)
    assert not re.search("serves again|leaves|moves", life.said()[since:])

    life.kube.has_room = True
    life.wait_until(lambda: life.workers() == others | {"decode-2": True})
    assert "finds no place" not in life.scale()[1]


def test_fewer_workers_are_fewer_pods_and_no_request_fails(life: Life) -> None:
    before = {one["metadata"]["name"] for one in life.kube.pods("decode")}
    with life.load() as load:
        code, said = life.scale("--decode", "1")
        assert code == 0, said
        life.wait_pods(prefill=1, decode=1)
        life.wait_until(lambda: len(life.kube.api.find_all("pods")) == 3)  # with the head's
    assert load.all_right, load.answers
    kept = {one["metadata"]["name"] for one in life.kube.pods("decode")}
    named = {
        name
        for call in life.kube.api.calls
        if call.status == 200 and call.verb == "PATCH"
        for one in call.body
        if one["path"] == "/spec/workerGroupSpecs/1/scaleStrategy"
        for name in one["value"]["workersToDelete"]
    }
    assert before - kept <= named
    assert named.isdisjoint(kept)
    hooks = [said for pod in life.kube.ended for said in pod.hook_said.values()]
    assert {code for code, _ in hooks} <= {0}, hooks
    # Not below the least number, however long nobody needs more.
    life.wait_decided()
    assert life.num_pods == {"prefill": 1, "decode": 1}
    assert life.kube.group("decode")["replicas"] == 1


def test_a_misspelt_resource_gets_no_pod(life: Life) -> None:
    def respell(old: str, new: str) -> None:
        def edit(cluster: Manifest) -> None:
            parameters = cluster["spec"]["workerGroupSpecs"][1]["rayStartParams"]
            assert old in parameters["resources"]
            parameters["resources"] = parameters["resources"].replace(old, new)

        life.kube.apply(edit)

    since = len(life.said())
    respell("disagg_decode", "disagg_decoed")
    life.wait_decided()
    assert life.scale("--decode", "2", "--no-wait")[0] == 0
    life.wait_said("worker decode-1: finds no place", since)
    life.wait_decided()
    assert len(life.kube.pods("decode")) == 1
    respell("disagg_decoed", "disagg_decode")
    life.wait_until(lambda: life.workers().get("decode-1"))


def test_nothing_was_refused_and_nothing_else_was_asked(life: Life) -> None:
    assert not life.kube.faults
    assert [call for call in life.kube.api.calls if call.status != 200] == []
    patches = [one for call in life.kube.api.calls if call.verb == "PATCH" for one in call.body]
    assert {one["op"] for one in patches} == {"replace"}
    asked = [one["value"] for one in patches if one["path"].endswith("/replicas")]
    assert asked
    assert set(asked) <= {1, 2, 3}
