"""A decode worker dies before its commit: another one takes the lease over."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from openai.types import Completion

from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import WINDOW, Expected, ServedModel, assert_exact

pytestmark = pytest.mark.timeout(600)

ANSWER_S = 60


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("take_over")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(
        directory,
        folder,
        {"max_step_tokens": 96, "take_over_ms": 30_000},
        {"worker_silent_ms": 60_000},
    )
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        yield ServedModel(cluster)


@pytest.fixture
def served(started: ServedModel) -> Iterator[ServedModel]:
    started.restore()
    started.wait_idle()  # nothing speaks for d1 rather than d0, so that the router takes d0
    yield started
    started.settle()


def stop_before_commit(served: ServedModel, expected: Expected, gate: str) -> Future[Completion]:
    """Return when d0 waits with READs, or with their ends, and token 0 is out."""
    told = served.cluster.tell("d0", f"hold {gate}")
    answer = served.ask_later(expected, "held")
    served.cluster.wait_told("d0", f"held {gate}", told)
    wait_until(lambda: served.cluster.record("held")["num_tokens"] == 1, "token 0")
    wait_until(lambda: leases(served) == ["SEALED"], "the seal")
    return answer


def leases(served: ServedModel) -> list[str]:
    return [lease.state for lease in served.cluster.status("p0").leases]


def generations(served: ServedModel) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.cluster.record("held")["generations"]
    return found


@pytest.mark.parametrize("gate", ["reads", "dones"])
def test_the_lease_goes_to_another_decode_worker(served: ServedModel, gate: str) -> None:
    cluster, expected = served.cluster, served.prompt(150)
    answer = stop_before_commit(served, expected, gate)
    num_steps = cluster.counts("p0")["steps"]
    before = cluster.counters("d1").get("take_overs", 0)
    cluster.workers["d0"].kill()
    assert_exact(answer.result(ANSWER_S), expected)
    first, second = generations(served)
    assert first["cause"].startswith("worker_lost")
    assert (first["num_tokens"], second["num_tokens"]) == (1, expected.num_tokens - 1)
    assert (second["prefill"]["worker_id"], second["decode"]["worker_id"]) == ("p0", "d1")
    assert "takes over the lease" in second["reason"]
    assert cluster.counters("d1")["take_overs"] == before + 1
    assert cluster.counts("p0")["steps"] == num_steps, "nothing is computed again"
    *windows, full = second["transfer"]["groups"]
    assert full["block_map"] == "p" * 10
    assert {group["block_map"] for group in windows} == {".......ppp"}
    cluster.wait_quiescent()
    assert leases(served) in ([], ["COMMITTED"])


def test_a_lease_that_is_gone_is_planned_anew(served: ServedModel) -> None:
    cluster, expected = served.cluster, served.prompt(150)
    answer = stop_before_commit(served, expected, "dones")
    cluster.tell("p0", "end_leases")
    cluster.workers["d0"].kill()
    assert_exact(answer.result(ANSWER_S), expected)
    _, second, third = generations(served)
    assert second["cause"].startswith("take_over_refused: none")
    assert third["num_prompt_tokens"] == 151
    cluster.wait_quiescent()


def test_without_another_decode_worker_it_is_computed_where_it_was_prefilled(
    served: ServedModel,
) -> None:
    """Control: it is d1 that the first test needs."""
    cluster, expected = served.cluster, served.prompt(150)
    answer = stop_before_commit(served, expected, "dones")
    cluster.workers["d1"].kill()
    wait_until(lambda: "d1" not in cluster.known(), "the router to drop d1")
    cluster.workers["d0"].kill()
    assert_exact(answer.result(ANSWER_S), expected)
    _, second = generations(served)
    assert second["local"]
    assert second["decode"]["worker_id"] == "p0"
    # The lease nobody took over has ended with its generation: it need not wait for its time.
    cluster.wait_quiescent()


def test_one_corrupted_block_is_seen(served: ServedModel) -> None:
    """Control: the bytes that d1 reads under the lease are those it answers from."""
    cluster, expected = served.cluster, served.prompt(150)
    answer = stop_before_commit(served, expected, "dones")
    told = cluster.tell("d1", "corrupt 5")
    cluster.workers["d0"].kill()
    completion = answer.result(ANSWER_S)
    cluster.wait_told("d1", "corrupted 5 ", told)
    with pytest.raises(AssertionError):
        assert_exact(completion, expected)
