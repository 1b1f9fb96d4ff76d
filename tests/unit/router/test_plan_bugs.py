"""A request whose planning fails by a bug: its client gets an error, the router goes on."""

import asyncio

from disagg.router import plan_bugs
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.registry import DEFAULT_POLICY, POLICIES
from tests.unit.router.test_router_tasks import failures

BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
UNLUCKY = BODY | {"prompt": [7] * 13}


class Buggy(PrefixThenLoad):
    def plan(self, demand, candidates):
        if demand.num_tokens == 13:
            raise KeyError("a bug of ours")
        return super().plan(demand, candidates)


async def test_its_client_gets_an_error_and_all_others_their_answers(
    open_house, monkeypatch, caplog
):
    monkeypatch.setitem(POLICIES, DEFAULT_POLICY, Buggy)
    house = await open_house(worker_prefill_tokens_max=1)
    gate = asyncio.Semaphore(0)
    worker = await house.add(gate=gate)
    post = house.http.post
    first = asyncio.create_task(post("/v1/completions", json=BODY))
    await worker.until(lambda: worker.submits, "the first one at the worker")
    unlucky = asyncio.create_task(post("/v1/completions", json=UNLUCKY))
    core = house.app.dispatcher.core
    await house.until(lambda: core.num_waiting == 1, "one that waits")
    last = asyncio.create_task(post("/v1/completions", json=BODY))
    await house.until(lambda: core.num_waiting == 2, "two that wait")
    for _ in range(12):
        gate.release()
    answers = [await one for one in (first, unlucky, last)]
    assert [one.status_code for one in answers] == [200, 500, 200]
    assert answers[1].json()["error"]["code"] == "internal_error"
    assert "KeyError: 'a bug of ours'" in caplog.text
    assert await failures(house, "plan") == 1
    assert await failures(house, "session") == 0
    assert len(worker.opened) == 1
    assert not house.app.dispatcher.broken.is_set()


async def test_where_nothing_can_be_planned_any_more_the_router_ends(open_house, monkeypatch):
    monkeypatch.setitem(POLICIES, DEFAULT_POLICY, Buggy)
    monkeypatch.setattr(plan_bugs, "PLAN_BUGS_MAX", 3)
    monkeypatch.setattr(plan_bugs, "APART_S", 0.0)
    house = await open_house()
    await house.add()
    broken = house.app.dispatcher.broken

    async def ask(*bodies):
        for body in bodies:
            await house.http.post("/v1/completions", json=body)

    await ask(UNLUCKY, UNLUCKY, BODY, UNLUCKY, UNLUCKY)
    assert not broken.is_set()
    await ask(UNLUCKY)
    assert broken.is_set()


async def test_many_prompts_of_one_body_do_not_end_the_router(open_house, monkeypatch, caplog):
    monkeypatch.setitem(POLICIES, DEFAULT_POLICY, Buggy)
    house = await open_house(worker_prefill_tokens_max=1)
    gate = asyncio.Semaphore(0)
    worker = await house.add(gate=gate)
    first = asyncio.create_task(house.http.post("/v1/completions", json=BODY))
    await worker.until(lambda: worker.submits, "the first one at the worker")
    num = 2 * plan_bugs.PLAN_BUGS_MAX
    many = BODY | {"prompt": [[7] * 13] * num}
    unlucky = asyncio.create_task(house.http.post("/v1/completions", json=many))
    core = house.app.dispatcher.core
    await house.until(lambda: core.num_waiting == num, "all of them to wait")
    for _ in range(3):
        gate.release()
    assert [(await one).status_code for one in (first, unlucky)] == [200, 500]
    assert await failures(house, "plan") == num
    assert caplog.text.count("Traceback") < plan_bugs.PLAN_BUGS_MAX
    assert not house.app.dispatcher.broken.is_set()
