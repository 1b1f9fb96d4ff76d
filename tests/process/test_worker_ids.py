"""A second process under a live worker's id: refused, told at both, and in once that is gone."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from disagg.workers.options import WorkerOptions
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, SMALL, START_S, Cluster, Process, running, wait_until

pytestmark = pytest.mark.timeout(900)

PROMPT = [1, *(20 + i * 37 % 200 for i in range(60))]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    model = make_checkpoint(tmp_path / "tiny", "gemma3")
    with running(Cluster(model, tmp_path), p0="prefill", d0="decode") as started:
        yield started


def second_life(cluster: Cluster, worker_id: str) -> Process:
    """Another process that says it is that worker."""
    options = WorkerOptions(
        worker_id=worker_id,
        role="prefill",
        model_dir=str(cluster.model_dir),
        model_name=MODEL,
        router_addresses=(cluster.grpc_address,),
        tls_directory=cluster.tls_directory,
        heartbeat_ms=200,
        **SMALL,
    )
    log = cluster.logs / f"{worker_id}-again"
    return Process("tests.process.worker_main", asdict(options), log)


def text_of(cluster: Cluster) -> str:
    answer = cluster.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0
    )
    return answer.choices[0].text


def test_who_lives_keeps_its_id(cluster: Cluster) -> None:
    expected = text_of(cluster)
    again = second_life(cluster, "p0")
    try:
        epoch = json.loads(again.wait_line("serving ", START_S)[8:])["epoch"]
        wait_until(lambda: "ALREADY_EXISTS" in again.logged(), "the refusal at the newcomer")
        holder = cluster.workers["p0"]
        claim = f"another process claims this worker's id: epoch {epoch}"
        wait_until(lambda: claim in holder.logged(), "the warning at the holder")
        wait_until(lambda: cluster.counters("p0").get("worker_id_claims"), "its counter")
        refused = (
            'disagg_routing_registrations_refused_total{cause="worker_id_taken",model_name="tiny"}'
        )
        assert cluster.metric(refused) >= 1
        assert "refused until it has gone" in cluster.router.logged()
        assert cluster.known()["p0"]["info"]["incarnation"]["epoch"] == cluster.epochs["p0"]
        assert text_of(cluster) == expected

        holder.kill()

        def has_moved() -> bool:
            view = cluster.known().get("p0")
            return bool(view and view["ready"] and view["info"]["incarnation"]["epoch"] == epoch)

        wait_until(has_moved, "the newcomer to be taken in")
        assert text_of(cluster) == expected
    finally:
        again.end()
