"""A decode worker with a tier, over NIXL: it loads what it has, for itself and for others."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, assert_exact, handed_over, is_reported

pytestmark = pytest.mark.timeout(300)

LENGTH, COMMON = 150, 144
"""A prompt and its last block end."""
OPTIONS = {"max_step_tokens": 96, "max_model_tokens": 1024}
ROUTER = {"pull_tokens_min": 64, "decode_prefill_tokens_max": 64, "worker_silent_ms": 60_000}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("tiers")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    with running(Cluster(directory, folder, OPTIONS, ROUTER)) as cluster:
        cluster.spawn("p0", "prefill")
        cluster.spawn("d0", "decode", tiers=(store(cluster),))
        cluster.wait_ready("p0", "d0")
        yield ServedModel(cluster)


def store(cluster: Cluster) -> str:
    return f"disk:{cluster.logs}/store?size=64MiB"


def in_tier_only(served: ServedModel, salt: str) -> tuple[int, ...]:
    """Serve a prompt, until d0's tier has it and no pool does, for the router too.

    Returns it with its answer.
    """
    cluster, first = served.cluster, served.prompt(LENGTH, 6, salt=salt)
    before = cluster.counters("d0").get("tier_blocks_written_disk", 0)
    served.serve(first)
    wait_until(
        lambda: cluster.counters("d0").get("tier_blocks_written_disk", 0) > before,
        "writes to the tier",
    )
    served.settle()  # who writes holds the blocks

    def pooled_tokens() -> int:
        return cluster.usable_tokens(first.prompt)["d0"]

    # Known before, so that nothing known after is an event that came, behind those of the tier.
    wait_until(lambda: pooled_tokens() == COMMON, "the router to know d0's pool")
    for name in ("p0", "d0"):
        cluster.tell(name, "forget")
        cluster.tell(name, "poison")
    wait_until(lambda: not cluster.known()["p0"]["index_entries"], "p0 to be empty")
    wait_until(lambda: not pooled_tokens(), "the router to know that d0's pool is empty")
    return first.whole


def record(served: ServedModel, name: str) -> dict[str, Any]:
    """The only generation of a request, once its prefill was reported."""
    wait_until(lambda: is_reported(served.cluster.record(name)), "the prefill's report")
    (generation,) = served.cluster.record(name)["generations"]
    found: dict[str, Any] = generation
    return found


def test_a_decode_worker_loads_what_nobody_then_prefills(served: ServedModel) -> None:
    cluster = served.cluster
    in_tier_only(served, "direct")
    before = cluster.counts("p0")
    prompt = served.prompt(LENGTH, 6, salt="direct")
    assert_exact(served.ask(prompt, "direct"), prompt)
    generation = record(served, "direct")
    assert generation["local"], generation["reason"]
    assert generation["decode"]["worker_id"] == "d0"
    assert "it loads" in generation["reason"]
    assert generation["hit_tokens"] == COMMON
    after = cluster.counts("p0")
    assert after["steps"] == before["steps"], "p0 has nothing to do with it"
    assert after["messages"] - before["messages"] <= 1, "but may keep its name"
    assert cluster.counters("d0")["tier_loaded_tokens"] == COMMON
    served.settle()


def test_what_a_decode_workers_tier_has_is_pulled_under_a_lease(served: ServedModel) -> None:
    """More than 64 tokens are left to compute, so p0 does, with the prefix from d0's tier.

    A third worker decodes: d0 has nothing to load for itself.
    """
    cluster = served.cluster
    whole = in_tier_only(served, "pulled")
    cluster.spawn("d-1", "decode")  # of equals the first by name is chosen
    cluster.wait_ready("d-1")
    served.settle()
    prompt = served.prompt(LENGTH + 100, 6, start=whole, salt="pulled")
    assert_exact(served.ask(prompt, "pulled"), prompt)
    record(served, "pulled")
    generation = handed_over(cluster.record("pulled"))
    assert generation["decode"]["worker_id"] == "d-1"
    pull = generation["pull"]
    assert (pull["owner"]["worker_id"], pull["kind"], pull["failed"]) == ("d0", "prefix", "")
    assert pull["num_tokens"] == generation["pulled_tokens"] == COMMON
    assert generation["hit_tokens"] == 0
    assert cluster.counters("d0")["tier_prefixes_loaded_to_lend"] == 1
    served.settle()
    cluster.workers["d-1"].kill()
    wait_until(lambda: set(cluster.known()) == {"p0", "d0"}, "the third worker to be gone")


def test_after_a_restart_the_router_knows_what_the_store_has(served: ServedModel) -> None:
    cluster = served.cluster
    in_tier_only(served, "restarted")
    cluster.workers["d0"].kill()
    cluster.spawn("d0", "decode", tiers=(store(cluster),))
    cluster.wait_ready("d0")
    wait_until(lambda: cluster.known()["d0"]["index_entries"], "the store to be known")
    prompt = served.prompt(LENGTH, 6, salt="restarted")
    assert_exact(served.ask(prompt, "restarted"), prompt)
    generation = record(served, "restarted")
    assert (generation["local"], generation["hit_tokens"]) == (True, COMMON), generation["reason"]
    served.settle()


def test_a_damaged_store_costs_time_and_no_token(served: ServedModel) -> None:
    """Control: the blocks above did come from the files."""
    cluster = served.cluster
    in_tier_only(served, "damaged")
    for file in (cluster.logs / "store").rglob("*-*"):
        if file.is_file() and file.stat().st_size > 4096:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    prompt = served.prompt(LENGTH, 6, salt="damaged")
    assert_exact(served.ask(prompt, "damaged"), prompt)
    assert record(served, "damaged")["hit_tokens"] < COMMON
    assert cluster.counters("d0")["tier_blocks_missed_disk"] > 0
    served.settle()
