"""A worker whose step does not end: its requests go to others, and it comes back when it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, assert_exact, handed_over

STEP_SLOW_MS = 300
"""Of workers that are held; those of others may take long on a busy machine."""
OPTIONS = {"max_step_tokens": 96, "max_model_tokens": 1024}


@contextmanager
def fleet(tmp_path: Path, worker_stalled_ms: int) -> Iterator[Cluster]:
    """Its prefill worker and the first of two that decode may stall."""
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    router = {"worker_silent_ms": 60_000, "worker_stalled_ms": worker_stalled_ms}
    with running(Cluster(directory, tmp_path, OPTIONS, router)) as cluster:
        cluster.spawn("p0", "prefill", step_slow_ms=STEP_SLOW_MS)
        cluster.spawn("d0", "decode", step_slow_ms=STEP_SLOW_MS)
        cluster.spawn("d1", "decode")
        cluster.wait_ready("p0", "d0", "d1")
        yield cluster


def test_what_comes_is_answered_by_others(tmp_path: Path) -> None:
    with fleet(tmp_path, worker_stalled_ms=600_000) as cluster:
        served = ServedModel(cluster)
        first = served.prompt(100, 4, salt="held")

        def stalled() -> bool:
            return bool(cluster.known()["d0"]["stats"]["stalled"])

        cluster.tell("d0", "hold steps")
        held = served.ask_later(first, "held")  # of equals the first by name decodes
        wait_until(stalled, "d0 to stall")
        # At once: by load alone every other one would go to d0.
        prompts = {f"free-{number}": served.prompt(40, 4, salt=f"{number}") for number in range(6)}
        asked = {name: served.ask_later(one, name) for name, one in prompts.items()}
        for name, answer in asked.items():
            assert_exact(answer.result(), prompts[name])
            assert handed_over(cluster.record(name))["decode"]["worker_id"] == "d1"
        assert not held.done()
        cluster.tell("d0", "pass steps")
        assert_exact(held.result(), first)
        wait_until(lambda: not stalled(), "d0 to go on")
        served.wait_idle()
        again = served.prompt(40, 4, salt="again")
        assert_exact(served.ask(again, "again"), again)
        assert handed_over(cluster.record("again"))["decode"]["worker_id"] == "d0"
        served.settle()


def test_what_it_has_goes_on_at_others(tmp_path: Path) -> None:
    with fleet(tmp_path, worker_stalled_ms=STEP_SLOW_MS) as cluster:
        served = ServedModel(cluster)
        prompt = served.prompt(100, 200, salt="long")
        answer = served.ask_later(prompt, "long")  # of equals the first by name decodes
        wait_until(lambda: cluster.record("long")["num_tokens"] > 4, "the first tokens")
        cluster.tell("d0", "hold steps")
        assert_exact(answer.result(), prompt)  # while it is held
        first, second = cluster.record("long")["generations"]
        assert first["cause"].startswith("worker_stalled: d0")
        assert first["num_tokens"] > 4
        assert second["decode"]["worker_id"] == "d1"
        assert cluster.known()["d0"]["stats"]["stalled"]
        cluster.tell("d0", "pass steps")
        wait_until(lambda: not cluster.known()["d0"]["stats"]["stalled"], "d0 to go on")
        served.settle()


def test_a_prompt_that_it_computes_goes_on_at_others(tmp_path: Path) -> None:
    with fleet(tmp_path, worker_stalled_ms=STEP_SLOW_MS) as cluster:
        served = ServedModel(cluster)
        prompt = served.prompt(300, 8, salt="prompt")
        cluster.tell("p0", "hold steps")
        answer = served.ask_later(prompt, "prompt")  # of equals the first by name prefills
        assert_exact(answer.result(), prompt)  # while it is held
        first, second = cluster.record("prompt")["generations"]
        assert first["prefill"]["worker_id"] == "p0"
        assert first["cause"].startswith("worker_stalled: p0")
        assert second["prefill"]["worker_id"] != "p0"
        cluster.tell("p0", "pass steps")
        wait_until(lambda: not cluster.known()["p0"]["stats"]["stalled"], "p0 to go on")
        served.settle()
