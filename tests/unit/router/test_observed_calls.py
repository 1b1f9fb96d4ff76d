"""What one call of a client counts as: a request once, each prompt once, each choice's tokens."""

import asyncio
import json
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disagg.messages.session import EndReason, PartEnded
from disagg.router.choices import SHARED_AFTER_TOKENS
from disagg.testing.scripted_worker import BLOCK_TOKENS

PROMPT = [5, 6]
LONG = list(range(10, 10 + BLOCK_TOKENS + 2))
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "seed": 1}
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
REQUEST_TIMES = ("time_to_first_token_seconds", "request_seconds")
CHOICE_TIMES = ("request_decode_seconds", "time_per_output_token_seconds")


class Counts:
    """The page of metrics: sums over all labels but one."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str) -> float:
        return sum(self.by(name, "").values())

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and sample.value:
                key = sample.labels.get(label, "")
                found[key] = found.get(key, 0) + sample.value
        return found


async def counts(house) -> Counts:
    return Counts((await house.admin.get("/metrics")).text)


async def outcomes(house) -> dict[str, float]:
    found = await counts(house)
    assert found.total("disagg_requests_live") == 0
    return found.by("disagg_requests_total", "outcome")


async def ask(house, **body) -> dict[str, Any]:
    answer = await house.http.post("/v1/completions", json=BODY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("body", "num_prompts", "num_choices"),
    [
        ({}, 1, 1),
        ({"n": 3}, 1, 3),
        ({"n": 3, "prompt": LONG}, 1, 3),
        ({"prompt": [PROMPT, LONG, [7]]}, 3, 3),
        ({"prompt": [PROMPT, LONG], "n": 2}, 2, 4),
        ({"best_of": 3, "n": 1}, 1, 3),
    ],
)
async def test_a_call_counts_once_its_prompts_once_each_and_its_choices_all(
    open_house, body, num_prompts, num_choices
):
    house = await open_house()
    await house.add(hit_tokens=1)
    usage = (await ask(house, **body))["usage"]
    found = await counts(house)
    for start in ("disagg_", "vllm:"):
        sources = found.by(f"{start}prompt_tokens_by_source_total", "source")
        assert sum(sources.values()) == usage["prompt_tokens"]
        assert sources["local_cache_hit"] == num_prompts  # a token of each, as the worker said
        assert set(sources) <= set(SOURCES)
        assert found.total(f"{start}prompt_tokens_total") == usage["prompt_tokens"]
        assert found.total(f"{start}generation_tokens_total") == usage["completion_tokens"]
    # What workers did is more as soon as two choices share a prompt: the control of "once".
    prefilled = found.total("disagg_routing_prefill_tokens_total")
    assert (prefilled > usage["prompt_tokens"]) == (num_choices > num_prompts)
    assert await outcomes(house) == {"length": 1}
    assert found.by("vllm:request_success_total", "finished_reason") == {"length": 1}
    for name in REQUEST_TIMES:
        assert found.total(f"disagg_{name}_count") == 1, name
    parts = found.by("disagg_time_to_first_token_part_seconds_count", "part")
    assert parts == dict.fromkeys(("queue", "prefill", "transfer", "router"), 1)
    whole = found.total("disagg_time_to_first_token_seconds_sum")
    assert found.total("disagg_time_to_first_token_part_seconds_sum") == pytest.approx(whole)
    for name in CHOICE_TIMES:
        assert found.total(f"disagg_{name}_count") == num_choices, name
    assert found.total("disagg_routing_requests_total") == num_choices


async def test_a_call_ends_with_its_last_choice(house):
    """And what it takes is the client's time: not that of one choice."""
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    call = asyncio.create_task(ask(house, n=2, prompt=LONG))
    await worker.until(lambda: worker.submits, "the submit")
    for _ in range(SHARED_AFTER_TOKENS):
        worker.gate.release()
    await worker.until(lambda: len(worker.submits) == 2, "the choice that waited")
    for _ in range(BODY["max_tokens"]):
        worker.gate.release()  # at least one of the two is not complete
    core = house.app.dispatcher.core
    await house.until(lambda: core.num_live == 1, "one of them to be complete")
    found = await counts(house)
    assert found.total("disagg_requests_live") == 1
    assert found.total("disagg_requests_total") == 0
    for _ in range(BODY["max_tokens"]):
        worker.gate.release()
    await call
    assert await outcomes(house) == {"length": 1}
    whole = (await counts(house)).total("disagg_request_seconds_sum")
    records = [house.app.dispatcher.core.record(id_) for id_ in ids(house)]
    spans_ms = [(one.received_ms, one.finished_ms) for one in records]
    assert spans_ms[1][0] >= records[0].first_token_ms  # its own time began when it did
    first, last = min(one[0] for one in spans_ms), max(one[1] for one in spans_ms)
    assert whole == pytest.approx((last - first) / 1000)


def ids(house) -> list[str]:
    return [submit.key.request_id for submit in house.workers[0].submits]


async def test_a_call_of_which_one_choice_fails_counts_as_its_error(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    worker.misbehave = lambda submit: (
        [PartEnded(submit.key, EndReason.REJECTED, "no")] if ids(house).index(submit.key.request_id)
        else None
    )  # fmt: skip
    answer = await house.http.post("/v1/completions", json=BODY | {"n": 3})
    assert answer.status_code == 400
    code = answer.json()["error"]["code"]
    assert await outcomes(house) == {code: 1}
    assert (await counts(house)).total("disagg_request_seconds_count") == 0


async def test_a_call_for_whose_choices_there_is_no_room_counts_as_one(open_house):
    house = await open_house(requests_max=3)
    worker = await house.add()
    worker.gate = asyncio.Semaphore(0)
    lives = asyncio.create_task(house.http.post("/v1/completions", json=BODY))
    await worker.until(lambda: worker.submits, "the one that takes a place")
    answer = await house.http.post("/v1/completions", json=BODY | {"n": 3})
    assert answer.status_code == 429
    accepted = (await counts(house)).total("disagg_routing_requests_total")
    assert accepted == 1
    for _ in range(BODY["max_tokens"]):
        worker.gate.release()
    assert (await lives).status_code == 200
    assert await outcomes(house) == {answer.json()["error"]["code"]: 1, "length": 1}


async def test_a_client_that_leaves_is_counted_once(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    worker.gate.release()
    async with house.http.stream(
        "POST", "/v1/completions", json=BODY | {"n": 2, "stream": True}
    ) as answer:
        await anext(answer.aiter_lines())
    metrics = house.app.dispatcher.observers.metrics
    await house.until(lambda: not Counts(metrics.text()).total("disagg_requests_live"), "its end")
    assert await outcomes(house) == {"cancelled": 1}
    found = await counts(house)
    assert found.by("vllm:request_success_total", "finished_reason") == {"abort": 1}
    assert found.total("disagg_request_seconds_count") == 0


async def test_what_a_router_ends_that_stops_is_no_cancel_of_a_client(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    call = asyncio.create_task(house.http.post("/v1/completions", json=BODY))
    await worker.until(lambda: worker.submits, "the submit")
    await house.app.dispatcher.stop()
    assert (await call).status_code == 503
    text = house.app.dispatcher.observers.metrics.text()
    assert Counts(text).by("disagg_requests_total", "outcome") == {"router_stopping": 1}


async def test_what_never_reached_a_worker_is_counted_by_its_error(house):
    for body, status in (({"n": 0}, 400), ({"model": "other"}, 404), ({"prompt": []}, 400)):
        answer = await house.http.post("/v1/completions", json=BODY | body)
        assert answer.status_code == status
    assert await outcomes(house) == {"invalid_value": 2, "model_not_found": 1}


async def test_there_is_a_line_per_choice_where_that_is_set(open_house, caplog):
    caplog.set_level(logging.INFO, "disagg.router.observed_call")
    for log_requests in (False, True):
        house = await open_house(log_requests=log_requests)
        await house.add()
        headers = {"x-request-id": "named"}
        answer = await house.http.post(
            "/v1/completions", json=BODY | {"n": 2, "prompt": "SECRET"}, headers=headers
        )
        assert answer.status_code == 200
        found = [vars(line) for line in caplog.records if hasattr(line, "outcome")]
        assert len(found) == 2 * log_requests
    assert [line["request_id"] for line in found] == ["named-0", "named-1"]
    assert {line["outcome"] for line in found} == {"length"}
    assert {line["num_tokens"] for line in found} == {4}
    assert {line["decode_worker"] for line in found} == {"w1"}
    assert "SECRET" not in json.dumps(found, default=str)
