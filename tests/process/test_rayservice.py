"""A fleet as an application of Ray Serve, deployed as KubeRay's operator does it; two of them.

Ray, its dashboard, Serve, the workers and the router are real; the configuration of Serve is that
of the manifest. What an operator adds, pods and Services, is not there. The tests are steps of one
life and run in their order.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.config.settings import WorkerSettings
from tests.checkpoints import make_checkpoint
from tests.process.harness import HASH_KEY, MODEL, SMALL, Cluster, running, wait_until
from tests.process.program import ROOT
from tests.process.serving_ray import BOUND_S, ServingRay, serve_config
from tests.process.timed_load import Expected, expect, load

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A router, which runs on whatever Ray does."""
    folder = tmp_path_factory.mktemp("rayservice")
    model = make_checkpoint(folder / "tiny", "gemma3")
    slow = {"worker_silent_ms": 60_000}  # a worker that a busy machine starves stays known
    with running(Cluster(model, folder, router_options=slow)) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(house: Cluster) -> list[Expected]:
    return [expect(house.model_dir, length, NUM_TOKENS, f"p{length}") for length in (40, 90, 150)]


@pytest.fixture(scope="module")
def settings(house: Cluster) -> Path:
    """The manifest's settings, but for what is of a cluster's pods: addresses, paths, sizes."""
    found = yaml.safe_load((ROOT / "k8s/base/disagg.yaml").read_text())
    del found["router"], found["cluster"]["hash_key_file"]
    found["model"] = {"dir": str(house.model_dir), "name": MODEL}
    sizes = {key: value for key, value in SMALL.items() if key in WorkerSettings.model_fields}
    found["worker"] = {"host": "127.0.0.1", "drain_timeout_ms": 120_000} | sizes
    found["transfer"] = {"reserve_timeout_ms": 30_000, "reserve_passes_max": 1_000}
    found["cluster"] |= {
        "hash_key": HASH_KEY,
        "router_addresses": [house.grpc_address],
        "tls_directory": house.tls_directory,
        "num_cpus_per_worker": 0,
        "heartbeat_ms": 200,
        "start_timeout_s": BOUND_S,
    }
    path = house.logs / "disagg.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


@pytest.fixture(scope="module")
def blue(house: Cluster) -> Iterator[ServingRay]:
    started = ServingRay("disagg-blue", house.logs)
    yield started
    started.end()


def ready(house: Cluster) -> dict[str, str]:
    """Epochs of the workers that take requests, by id."""
    return {
        one: view["info"]["incarnation"]["epoch"]
        for one, view in house.known().items()
        if view["ready"]
    }


def wait_ready(house: Cluster, *names: str) -> dict[str, str]:
    wait_until(lambda: ready(house).keys() == set(names), f"{names} to be ready", BOUND_S)
    return ready(house)


BLUE = ("disagg-blue-prefill-0", "disagg-blue-decode-0")
GREEN = ("disagg-green-prefill-0", "disagg-green-decode-0")


def answers_right(house: Cluster, expected: Expected) -> bool:
    answer = house.client.completions.create(
        model=MODEL,
        prompt=expected.prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        timeout=BOUND_S,
    )
    return list(answer.choices[0].model_extra["token_ids"]) == expected.token_ids  # type: ignore[index]


def find_pids(ray: ServingRay, *words: str) -> list[int]:
    """Processes of the cluster whose command line has all these words."""
    found = []
    for one in ray.program.tree():
        try:
            line = Path(f"/proc/{one.pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(one.pid)
    return found


def test_nobody_deploys_without_the_clusters_token(blue: ServingRay, settings: Path) -> None:
    status, _ = blue.ask("PUT", serve_config(settings), token="0" * 64)
    assert status == 403
    assert blue.application() == {}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"config": "/nowhere/disagg.yaml"}, "/nowhere/disagg.yaml: No such file"),
        ({"set": {"worker.num_block": 7}}, "worker.num_block"),
        ({"replicas": 2}, "replicas: no such argument"),
        # What only the head's pod has is looked at there, by the replica.
        ({"set": {"cluster.hash_key": "", "cluster.hash_key_file": "/nowhere"}}, "hash_key_file"),
        ({"set": {"cluster.hash_key": ""}}, "which secret names KV blocks"),
        ({"set": {"model.dir": "/nowhere"}}, "is not a checkpoint directory"),
    ],
)
def test_settings_that_cannot_be_are_the_applications_fault(
    blue: ServingRay, settings: Path, args: dict[str, Any], told: str
) -> None:
    config = serve_config(settings)
    config["applications"][0]["args"] |= args
    blue.deploy(config)
    found = blue.wait_for("DEPLOY_FAILED", "RUNNING")
    said = [found["message"], *(one["message"] for one in found["deployments"].values())]
    assert found["status"] == "DEPLOY_FAILED"
    assert any(told in one for one in said), said


def test_it_runs_when_the_workers_serve_and_not_before(
    blue: ServingRay, house: Cluster, settings: Path, prompts: list[Expected]
) -> None:
    blue.deploy(serve_config(settings))
    found = blue.wait_for("DEPLOYING", "RUNNING")
    assert (found["status"], ready(house)) == ("DEPLOYING", {})
    while found["status"] != "RUNNING":
        assert found["status"] == "DEPLOYING", found
        before = ready(house)  # asked before the status is: it may change in between
        found = blue.application()
        assert len(before) == 2 or found["status"] != "RUNNING" or len(ready(house)) == 2
    assert ready(house).keys() == set(BLUE)
    assert answers_right(house, prompts[0])
    # The readiness probe of the manifest's pods asks this.
    assert "raylet: success" in blue.raylet_health()


def test_a_killed_worker_comes_back_and_the_application_runs_on(
    blue: ServingRay, house: Cluster, prompts: list[Expected]
) -> None:
    before = wait_ready(house, *BLUE)
    os.kill(blue.worker_pid(BLUE[1], before[BLUE[1]]), signal.SIGKILL)
    wait_until(lambda: ready(house).get(BLUE[1], before[BLUE[1]]) != before[BLUE[1]], "it", BOUND_S)
    after = wait_ready(house, *BLUE)
    assert after[BLUE[0]] == before[BLUE[0]]
    assert blue.application()["status"] == "RUNNING"
    assert answers_right(house, prompts[1])


@pytest.mark.parametrize(
    "who", [("disagg.commands workers",), ("ServeReplica",)], ids=["supervisor", "replica"]
)
def test_who_looks_after_the_workers_may_end_and_they_stay(
    blue: ServingRay, house: Cluster, who: tuple[str, ...]
) -> None:
    before = wait_ready(house, *BLUE)
    (pid,) = find_pids(blue, *who)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: set(find_pids(blue, *who)) - {pid}, "another one", BOUND_S)
    blue.wait_for("RUNNING")
    wait_until(lambda: len(find_pids(blue, "disagg.commands workers")) == 1, "one", BOUND_S)
    assert wait_ready(house, *BLUE) == before


def test_other_settings_are_rolled_out_in_place_and_one_without_a_place_is_named(
    blue: ServingRay, house: Cluster, settings: Path, prompts: list[Expected]
) -> None:
    before = wait_ready(house, *BLUE)
    # There are resources for two of a role; the third finds no place.
    given = {"cluster.num_decode": 3, "cluster.start_timeout_s": 30}
    blue.deploy(serve_config(settings, given))
    found = blue.wait_for("DEPLOY_FAILED")
    (deployment,) = found["deployments"].values()
    # Of three tries, each of which finds the last one's workers, the last is told.
    told = "worker disagg-blue-decode-2 does not serve: it starts, or waits for a host with room"
    assert told in deployment["message"]
    assert "worker disagg-blue-decode-2: finds no place: it needs" in blue.logged()
    after = ready(house)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {"disagg-blue-decode-1"}
    assert answers_right(house, prompts[2])
    # And back: who is too many drains and ends, nobody else is touched.
    blue.deploy(serve_config(settings))
    blue.wait_for("RUNNING")
    assert wait_ready(house, *BLUE) == before


def test_another_cluster_takes_its_place_and_no_request_fails(
    blue: ServingRay, house: Cluster, settings: Path, prompts: list[Expected]
) -> None:
    """What a changed ``rayClusterConfig`` does: the second runs, then the first goes."""
    wait_ready(house, *BLUE)
    green = ServingRay("disagg-green", house.logs)
    try:
        with load([house.url], prompts) as sent:
            green.deploy(serve_config(settings))
            green.wait_for("RUNNING")
            assert ready(house).keys() == {*BLUE, *GREEN}
            blue.deploy(serve_config(settings) | {"applications": []})
            assert blue.wait_for("") == {}
            assert ready(house).keys() == set(GREEN)
            left = sent.num_tokens()
            wait_until(lambda: sent.num_tokens() > left + 10 * NUM_TOKENS, "load", BOUND_S)
        assert [one.error for one in sent.sent if one.error] == []
        assert len(sent.sent) > 10
        assert find_pids(blue, "disagg.commands workers") == []
        assert answers_right(house, prompts[0])

        # Negative control: without names of their own the second fleet is not taken in, and never
        # said to run; the reason names the id.
        same = {"cluster.worker_id_prefix": "disagg-green", "cluster.start_timeout_s": 30}
        before = ready(house)
        blue.deploy(serve_config(settings, same))
        found = blue.wait_for("DEPLOY_FAILED", "RUNNING")
        assert found["status"] == "DEPLOY_FAILED"
        (deployment,) = found["deployments"].values()
        assert "ALREADY_EXISTS" in deployment["message"]
        assert "disagg-green-prefill-0" in deployment["message"]
        assert ready(house) == before
        assert answers_right(house, prompts[1])
    finally:
        green.end()
