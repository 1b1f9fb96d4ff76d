"""An answer that lost its memory goes on where there is some to spare, with the tokens it has."""

from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running
from tests.process.served_model import WINDOW, ServedModel, assert_exact

NUM_TOKENS = 300


def test_it_goes_on_at_a_worker_with_memory(tmp_path: Path) -> None:
    """Eight answers grow until the decode worker's pool is full; the prefill worker's is empty."""
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    options = {"max_step_tokens": 96, "max_model_tokens": 1024}
    router = {"worker_silent_ms": 60_000}
    with running(Cluster(directory, tmp_path, options, router)) as cluster:
        cluster.spawn("p0", "prefill")
        cluster.spawn("d0", "decode", num_blocks=120)
        cluster.wait_ready("p0", "d0")
        served = ServedModel(cluster)
        for number in range(4):  # steps and links are measured
            known = served.prompt(60, 8, salt=f"first-{number}")
            assert_exact(served.ask(known, f"first-{number}"), known)
        prompts = {f"grows-{n}": served.prompt(60, NUM_TOKENS, salt=f"{n}") for n in range(8)}
        asked = {name: served.ask_later(one, name) for name, one in prompts.items()}
        for name, answer in asked.items():
            assert_exact(answer.result(), prompts[name])
        records = [cluster.record(name) for name in prompts]
        moved = [one for one in records if len(one["generations"]) > 1]
        assert moved, cluster.counters("d0")
        for record in moved:
            first, second = record["generations"]
            assert first["cause"].startswith("preempted: d0")
            assert second["decode"]["worker_id"] == "p0"
        replans = f'disagg_routing_replans_total{{cause="preempted",model_name="{MODEL}"}}'
        assert cluster.metric(replans) == len(moved)
        served.settle()
