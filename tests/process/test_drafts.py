"""Speculative decoding end to end: handed over, streamed, and where the decode worker was killed.

A bias leaves the model a few tokens, which come again and again, so that drafts are right at times.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running, wait_until
from tests.process.served_model import (
    GAP_MIN,
    WINDOW,
    Expected,
    ServedModel,
    assert_exact,
    handed_over,
)

pytestmark = pytest.mark.timeout(600)

FEW = (70, 71, 72)
BIAS = {"logit_bias": dict.fromkeys(map(str, FEW), 90)}
NUM_TOKENS, STEPS_BEFORE = 60, 5


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("drafts")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(directory, folder, {"max_step_tokens": 96, "num_speculative_tokens": 4})
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        yield ServedModel(cluster)


@pytest.fixture
def served(started: ServedModel) -> Iterator[ServedModel]:
    started.restore()
    yield started
    started.settle()


def only_few(logits: torch.Tensor, _: Sequence[int]) -> torch.Tensor:
    biased = logits.clone()
    biased[list(FEW)] += 90.0
    return biased


def clear_prompt(served: ServedModel) -> Expected:
    for seed in range(20):
        prompt = random.Random(seed).choices(FEW, k=50)
        expected = served.expect(prompt, NUM_TOKENS, only_few)
        if expected.min_gap > GAP_MIN:
            return expected
    raise AssertionError("no clear prompt")


def counted(served: ServedModel, name: str) -> int:
    return sum(served.cluster.counters(one).get(name, 0) for one in served.cluster.living())


def test_a_handed_over_answer_is_exact_and_drafts_are_counted(served: ServedModel) -> None:
    expected, request_id = clear_prompt(served), served.new_id()
    assert_exact(served.ask(expected, request_id, **BIAS), expected)
    decode = handed_over(served.cluster.record(request_id))["decode"]["worker_id"]
    right, drafted = (counted(served, f"{one}draft_tokens") for one in ("accepted_", ""))
    assert 0 < right < drafted
    labels = f'model_name="{MODEL}",role="decode",worker="{decode}"'
    series = f"disagg_worker_accepted_draft_tokens_total{{{labels}}}"
    wait_until(lambda: served.cluster.metric(series) == right, "the router to show them")
    asked: Any = served.body(expected, **BIAS) | {"stream": True}
    stream = served.cluster.client.completions.create(**asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == "".join(expected.texts)


def test_an_answer_goes_on_where_its_worker_was_killed(served: ServedModel) -> None:
    cluster, expected, request_id = served.cluster, clear_prompt(served), served.new_id()
    told = {}
    for name in ("d0", "d1"):
        cluster.tell(name, "hold steps")
        told[name] = cluster.tell(name, f"pass steps {STEPS_BEFORE}")
    answer = served._threads.submit(served.ask, expected, request_id, **BIAS)
    (killed,) = wait_until(lambda: held(cluster, told), "a decode worker to be held")
    wait_until(lambda: num_tokens(cluster, request_id) > STEPS_BEFORE, "its tokens")
    cluster.workers[killed].kill()
    for other in cluster.living():
        cluster.tell(other, "pass steps")
    assert_exact(answer.result(60), expected)
    first, second = cluster.record(request_id)["generations"]
    assert first["cause"].startswith("worker_lost")
    assert STEPS_BEFORE < first["num_tokens"] < NUM_TOKENS
    assert second["decode"]["worker_id"] != killed


def num_tokens(cluster: Cluster, request_id: str) -> int:
    answer = cluster.admin.get(f"/v1/disagg/requests/{request_id}")
    return int(answer.json()["num_tokens"]) if answer.status_code == 200 else 0


def held(cluster: Cluster, told: dict[str, int]) -> list[str]:
    return [name for name, at in told.items() if "held steps" in cluster.workers[name].lines[at:]]
