"""Why a request went where it went: in its record, in a header, on /metrics, as a command."""

import asyncio
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.commands.explain import explain
from disagg.errors import ConfigError, RequestError
from disagg.router.callers import OBSERVE, SERVE, Caller, ForbiddenError
from disagg.router.explanation import wants_debug
from disagg.testing.scripted_worker import READY
from tests.unit.routing.measured import ALL_STEPS

ROOT = Path(__file__).parents[3]
ASK = {"model": "tiny", "prompt": [5, 6], "max_tokens": 12, "ignore_eos": True}
MEASURED = replace(READY, step_times=ALL_STEPS)
DEBUG = {"x-disagg-debug": "1"}


@pytest.fixture
async def told(open_house):
    """A router whose only worker has said how long its steps take."""
    house = await open_house(policy="estimated")
    await house.add(stats=MEASURED)
    return house


async def test_a_record_has_the_candidates_with_their_estimates_and_the_choice(told):
    answer = await told.http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    record = (await told.admin.get("/v1/disagg/requests/mine")).json()
    (plan,) = record["generations"]
    (chosen,) = plan["considered"]
    assert (chosen["prefill"], chosen["decode"], chosen["chosen"]) == ("w1", "w1", True)
    assert chosen["estimate"] == plan["estimate"]
    assert plan["estimate"]["ttft_ms"] == pytest.approx(2.2, abs=0.3), "a step, and two tokens"


async def test_the_header_is_there_if_it_is_asked_for(told):
    for stream in (False, True):
        answer = await told.http.post("/v1/completions", json=ASK | {"stream": stream})
        assert "x-disagg-plan" not in answer.headers
        answer = await told.http.post(
            "/v1/completions", json=ASK | {"stream": stream}, headers=DEBUG
        )
        plan = json.loads(answer.headers["x-disagg-plan"])
        (considered,) = plan["considered"]
        assert (plan["plan"], considered["chosen"]) == (1, True)
        assert considered["ttft_ms"] > 0


async def test_without_measurements_the_estimate_is_not_made_up(house):
    answer = await house.http.post("/v1/completions", json=ASK, headers=DEBUG)
    (considered,) = json.loads(answer.headers["x-disagg-plan"])["considered"]
    assert "ttft_ms" not in considered
    text = (await house.admin.get("/metrics")).text
    assert not re.search(r'disagg_estimate_ratio_count\{.*of="ttft"', text)


async def test_estimates_are_compared_with_what_was_taken(told):
    for number in range(1, 50):
        await told.http.post("/v1/completions", json=ASK)
        text = (await told.admin.get("/metrics")).text
        found = re.search(r'disagg_estimate_ratio_count\{.*of="ttft".*\} (\S+)', text)
        assert found is not None
        assert float(found[1]) == number
        if re.search(r'disagg_estimate_ratio_count\{.*of="tpot".*\} 1.0', text):
            return  # an answer that came within a millisecond has no time per token
    pytest.fail("no time per token was compared")


def test_only_who_may_observe_sees_workers():
    serve, observe = (Caller("t", "k", frozenset((one,))) for one in (SERVE, OBSERVE))
    asked = {b"x-disagg-debug": b"1"}
    assert wants_debug(asked, observe)
    assert not wants_debug({}, serve)
    assert not wants_debug({b"x-disagg-debug": b"0"}, serve)
    with pytest.raises(ForbiddenError):
        wants_debug(asked, serve)
    with pytest.raises(RequestError) as refused:
        wants_debug({b"x-disagg-debug": b"yes"}, observe)
    assert refused.value.param == "x-disagg-debug"


async def test_the_command_shows_them(told):
    await told.http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"})
    code, out = await run(told, "mine")
    assert code == 0, out
    assert "expected TTFT" in out
    assert "measured: TTFT" in out
    code, out = await run(told, "mine", "--json")
    assert json.loads(out)["plans"][0]["considered"][0]["chosen"] is True
    code, out = await run(told, "theirs")
    assert (code, "theirs" in out and "is known" in out) == (2, True), out
    code, out = await run(told, "theirs", url=told.url)
    assert (code, "not the admin port" in out) == (2, True), out


async def run(house, *arguments, url=""):
    command = [sys.executable, "-m", "disagg.commands", "explain", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--url",
        url or str(house.admin.base_url),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_a_request_says_what_it_wants_and_is_shed_by_it(told):
    for wants, status in (
        ({"ttft_ms": 1, "shed": True}, 429),
        ({"ttft_ms": 1}, 200),
        ({"ttft_ms": 60_000, "tpot_ms": 0.5, "shed": True}, 200),
    ):
        answer = await told.http.post("/v1/completions", json=ASK | {"disagg": wants})
        assert answer.status_code == status, (wants, answer.text)
        page = f"/v1/disagg/requests/{answer.headers['x-request-id']}"
        record = (await told.admin.get(page)).json()
        assert bool(record["refused"]) == bool(status == 429) == (not record["generations"])
        assert all(one["estimate"]["ttft_ms"] > 1 for one in record["refused"])
        if status == 429:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("slo_unattainable", "disagg.ttft_ms")
            assert answer.headers["x-should-retry"] == "false", "later it is as late"
            assert "retry-after" not in answer.headers


async def test_a_deployment_sheds_and_a_request_may_want_otherwise(open_house):
    house = await open_house(slo_ttft_ms=1, slo_shed=True)
    await house.add(stats=MEASURED)
    assert (await house.http.post("/v1/completions", json=ASK)).status_code == 429
    wants = {"disagg": {"shed": False}}
    assert (await house.http.post("/v1/completions", json=ASK | wants)).status_code == 200
    assert (
        await house.http.post("/v1/completions", json=ASK | {"disagg": {"shed": True}})
    ).status_code == 429
    patient = {"disagg": {"ttft_ms": 60_000}}
    assert (await house.http.post("/v1/completions", json=ASK | patient)).status_code == 200


@pytest.mark.parametrize(
    ("wants", "field"),
    [
        ({"ttft_ms": 0}, "disagg.ttft_ms"),
        ({"tpot_ms": -1}, "disagg.tpot_ms"),
        ({"shed": 1}, "disagg.shed"),
        ({"shed": True}, "disagg.shed"),
        ({"shed": True, "tpot_ms": 50}, "disagg.shed"),
        ({"hand_over": 1}, "disagg.hand_over"),
        ({"speed": 1}, "disagg.speed"),
        (7, "disagg"),
    ],
)
async def test_what_cannot_be_wanted_is_refused_by_name(told, wants, field):
    answer = await told.http.post("/v1/completions", json=ASK | {"disagg": wants})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "DisaggFields" not in answer.text  # a class of ours


async def test_responses_and_chats_take_them_too(told):
    wants = {"model": "tiny", "disagg": {"ttft_ms": 1, "shed": True}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path, body in (("chat/completions", chat), ("responses", {"input": "hi"})):
        answer = await told.http.post(f"/v1/{path}", json=wants | body)
        assert answer.status_code == 429, (path, answer.text)


async def test_the_time_of_preparation_is_a_part_of_what_was_waited(told):
    """What a client waits for begins before its prompt is tokenised."""
    seen, generate = [], told.app.dispatcher.generate

    def keep(new, *arguments, **more):
        seen.append(new)
        return generate(new, *arguments, **more)

    told.app.dispatcher.generate = keep
    answer = await told.http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    (new,) = seen
    record = told.app.dispatcher.core.record("mine")
    assert new.received_ms == record.received_ms <= record.submitted_ms


@pytest.mark.parametrize(
    ("request_id", "said"),
    [("several", "several-0, several-1, …"), ("none", "no request 'none'"), ("it's", "no request")],
)
async def test_the_command_says_which_records_there_are(told, request_id, said):
    several = {"headers": {"x-request-id": "several"}}
    await told.http.post("/v1/completions", json=ASK | {"n": 2}, **several)
    url = f"http://127.0.0.1:{told.app.admin_port}"
    with pytest.raises(RequestError) as raised:
        await asyncio.to_thread(explain, request_id, url)
    assert said in raised.value.message


def test_the_command_wants_an_id():
    with pytest.raises(ConfigError, match="Its id is empty"):
        explain("")
