"""The prefix cache's settings and its reset, where only real workers show them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.workers.tiers.stored_block import parse_block_name
from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, assert_exact, is_reported

pytestmark = pytest.mark.timeout(600)

PATH = "/reset_prefix_cache"
LENGTH, COMMON = 150, 144
"""A prompt and its last block end."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "gemma3", "gemma3", window=WINDOW)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServedModel]:
    logs = tmp_path_factory.mktemp("pair")
    options = {"max_step_tokens": 96, "residency_sample": 1.0}
    with running(Cluster(model_dir, logs, options), p0="prefill", d0="decode") as cluster:
        yield ServedModel(cluster)


def hit_tokens(cluster: Cluster, request_id: str) -> int:
    """What its prefill found, once the router knows."""
    wait_until(lambda: is_reported(cluster.record(request_id)), "the prefill's report")
    found: int = cluster.record(request_id)["generations"][-1]["hit_tokens"]
    return found


def test_after_a_reset_a_known_prompt_is_computed_anew(pair: ServedModel) -> None:
    prompt = pair.prompt(LENGTH, 6, salt="known")
    pair.serve(prompt)
    pair.settle()
    assert pair.serve(prompt)["hit_tokens"] == COMMON  # control: it would have been found
    pair.settle()
    gaps = (
        'disagg_cache_block_reuse_gap_seconds_count{model_name="tiny",role="prefill",worker="p0"}'
    )
    wait_until(lambda: pair.cluster.metric(gaps) > 0, "the times of what was found")
    answer = pair.cluster.admin.post(PATH)
    assert answer.status_code == 200, answer.text
    told = {one["worker"]["worker_id"]: one for one in answer.json()["workers"]}
    assert sorted(told) == ["d0", "p0"]
    assert all(one["num_forgotten"] > 0 and one["in_use"] == {} for one in told.values())
    again = pair.serve(prompt)
    assert again["hit_tokens"] == 0
    *_, full = again["transfer"]["groups"]
    assert "h" not in full["block_map"]  # the decode worker had forgotten its part as well
    pair.settle()


def test_what_runs_during_a_reset_goes_on_and_leaves_nothing(pair: ServedModel) -> None:
    cluster = pair.cluster
    running_one = pair.prompt(LENGTH, 24, salt="running")
    told = cluster.tell("d0", "hold steps")
    answer = pair.ask_later(running_one, "running")
    cluster.wait_told("d0", "held steps", told)
    reset = cluster.admin.post(PATH).json()
    in_use = {one["worker"]["worker_id"]: one["in_use"] for one in reset["workers"]}
    assert reset["success"]
    assert in_use["d0"]["sequence"] > 0
    cluster.tell("d0", "pass steps")
    assert_exact(answer.result(), running_one)
    pair.settle()
    following = pair.prompt(LENGTH + 24 + 10, 4, start=running_one.whole, salt="running")
    generation = pair.serve(following)
    assert (generation["hit_tokens"], generation["pulled_tokens"]) == (0, 0)
    pair.settle()


def test_without_a_prefix_cache_answers_are_the_same_and_nothing_is_found(
    tmp_path: Path, model_dir: Path
) -> None:
    options = {"max_step_tokens": 96, "prefix_caching": False}
    with running(Cluster(model_dir, tmp_path, options), o0="both") as cluster:
        served = ServedModel(cluster)
        prompt = served.prompt(LENGTH, 6)
        for name in ("first", "second"):
            assert_exact(served.ask(prompt, name), prompt)
            assert hit_tokens(cluster, name) == 0
        answer = cluster.admin.post(PATH)
        assert answer.status_code == 503
        assert "cache.prefix_caching" in answer.json()["error"]["message"]
        served.settle()


def test_tiers_bring_nothing_back_after_a_reset_nor_after_a_restart(
    tmp_path: Path, model_dir: Path
) -> None:
    store = tmp_path / "store"
    options = {"max_step_tokens": 96, "tiers": ("host?size=16MiB", f"disk:{store}?size=16MiB")}
    with running(Cluster(model_dir, tmp_path, options), o0="both") as cluster:
        served = ServedModel(cluster)
        prompt = served.prompt(LENGTH, 6)

        def ask(name: str) -> int:
            """Tokens found of the prompt, of which the pool has nothing."""
            cluster.tell("o0", "forget")
            assert_exact(served.ask(prompt, name), prompt)
            return hit_tokens(cluster, name)

        def stored() -> list[Path]:
            return [path for path in store.rglob("*") if parse_block_name(path.name)]

        def written() -> None:
            count = "tier_blocks_written_disk"
            wait_until(lambda: cluster.counters("o0").get(count, 0) > 0, "a write to the disk")
            cluster.wait_quiescent()  # who writes holds the blocks

        assert ask("first") == 0
        written()
        assert ask("control") == COMMON
        assert stored()
        answer = cluster.admin.post(PATH)
        assert answer.status_code == 200, answer.text
        assert not stored(), "nor has the store"
        assert ask("reset") == 0
        written()
        assert ask("again") == COMMON
        assert cluster.admin.post(PATH).status_code == 200
        cluster.workers["o0"].kill()
        cluster.spawn("o0", "both")
        cluster.wait_ready("o0")
        assert ask("restarted") == 0
        assert cluster.counters("o0").get("tier_loads", 0) == 0
