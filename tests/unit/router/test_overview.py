"""What operators see of fleet and requests, and who sees whose; as one answer and as events."""

import asyncio
import json
from dataclasses import replace
from urllib.parse import quote

import pytest

from disagg.commands.status_view import fetch, is_well
from disagg.errors import RemoteFault
from disagg.router import overview as overview_module
from disagg.router.callers import ANYBODY, OBSERVE, SCOPES, Caller
from disagg.router.live_pages import FILES
from disagg.router.status_pages import OBSERVERS
from disagg.testing.scripted_worker import READY
from disagg.wire.v1 import identity_pb2, worker_pb2
from tests.unit.router.scripted_worker import BOUND_S
from tests.unit.router.test_callers import FILE, KEYS, PROMPT, ask, bearer

STATUS, EVENTS = "/v1/disagg/status", "/v1/disagg/events"


def answer_of(worker, *, lease_of: str = "held", version: str = "0.1.0", groups: int = 1):
    key = identity_pb2.RequestKey(request_id=lease_of, generation=1, router="r")
    other = identity_pb2.Incarnation(worker_id="other", epoch="e9")
    return worker_pb2.StatusResponse(
        leases=[
            worker_pb2.LeaseStatus(lease_id=4, key=key, reader=other, state="SEALED", num_blocks=3)
        ],
        inbound=[
            worker_pb2.InboundStatus(
                key=key, owner=other, state="READING", num_blocks=5, num_reads_in_progress=2
            )
        ],
        groups=[worker_pb2.GroupBlocks(num_held=7, num_cached=2)] * groups,
        version=version,
    )


async def overview(house, **more):
    response = await house.admin.get(STATUS, **more)
    assert response.status_code == 200, response.text
    return response.json()


async def events(response):
    """The whole events of a stream, as they come."""
    data = ""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield json.loads(data)
            data = ""


async def test_workers_are_shown_as_they_registered_reported_and_answer(open_house):
    house = await open_house()
    busy = replace(READY, num_waiting=2, num_running=1, num_prefill_tokens_queued=9)
    one = await house.add("w1", stats=busy, role="prefill")
    one.status = answer_of(one)
    await house.add("w2")  # one of a release without groups, or stuck: it answers with an error
    body = await overview(house)
    first, second = body["workers"]
    assert first["state"] == second["state"] == "ready"
    assert (first["role"], first["epoch"], first["version"]) == ("prefill", "e1", "0.1.0")
    assert [first[name] for name in ("num_waiting", "num_running")] == [2, 1]
    assert first["num_prefill_tokens_queued"] == 9
    assert first["pool"]["num_blocks_free"] == 100
    (group,) = first["pool"]["groups"]
    assert (group["kind"], group["num_held"], group["num_cached"]) == ("full_attention", 7, 2)
    assert first["leases"] == [
        {
            "lease_id": 4,
            "request_id": "held",
            "reader": {"worker_id": "other", "epoch": "e9"},
            "state": "SEALED",
            "num_blocks": 3,
        }
    ]
    assert (first["inbound"][0]["num_reads"], first["inbound"][0]["num_blocks"]) == (2, 5)
    assert (second["answered"], second["version"]) == (False, None)
    assert "UNIMPLEMENTED" in second["error"]
    assert second["pool"]["groups"][0]["num_held"] is None
    assert body["router"]["router_id"] == house.app.dispatcher.router_id


async def test_counts_of_other_groups_than_registered_are_not_believed(house):
    (worker,) = house.workers
    worker.status = answer_of(worker, groups=2)
    (shown,) = (await overview(house))["workers"]
    assert shown["pool"]["groups"][0]["num_held"] is None


async def test_a_worker_that_does_not_answer_holds_nobody_up_for_long(open_house):
    house = await open_house()
    stuck, well = await house.add("stuck"), await house.add("well")
    stuck.status_gate = asyncio.Event()
    well.status = answer_of(well)
    asked = [asyncio.create_task(overview(house)) for _ in range(5)]
    bodies = await asyncio.gather(*asked)
    for body in bodies:
        first, second = body["workers"]
        assert "DEADLINE_EXCEEDED" in first["error"]
        assert second["answered"]
    assert well.num_asked == 1  # however many look
    stuck.status_gate.set()


async def test_a_session_that_ends_while_its_worker_is_asked_takes_no_look_along(open_house):
    """As of a worker that is taken for lost: gRPC cancels what its closed channel still asks."""
    house = await open_house()
    lost, well = await house.add("lost"), await house.add("well")
    lost.status_gate = asyncio.Event()
    well.status = answer_of(well)
    asked = asyncio.create_task(overview(house))
    await lost.until(lambda: lost.num_asked == 1, "the question")
    await lost.end_sessions()
    answered = {one["worker_id"]: one["answered"] for one in (await asked)["workers"]}
    assert answered["well"]
    assert not answered.get("lost")
    lost.status_gate.set()


async def test_requests_are_listed_newest_first_in_few_words(house):
    for name in ("a", "b/c", "a"):
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
        await house.http.post("/v1/completions", json=body, headers={"x-request-id": name})
    newest, before = (await overview(house))["requests"]
    assert (newest["request_id"], newest["tenant"], newest["num_tokens"]) == ("a", "", 2)
    assert (newest["state"], newest["prefill"], newest["decode"]) == ("length", "w1", "w1")
    assert before["request_id"] == "b/c"
    for one in (newest, before):
        name = quote(one["request_id"], safe="")
        record = await house.admin.get(f"/v1/disagg/requests/{name}")
        assert record.json()["request_id"] == one["request_id"]


async def test_an_observer_sees_no_other_tenants_requests_an_admin_all(open_house):
    house = await open_house(api_keys=FILE)
    worker = await house.add(prompt=len(PROMPT))
    worker.status = answer_of(worker, lease_of="bob/his")
    await ask(house, "alice", "hers")
    await ask(house, "bob", "his")
    seen = {}
    for name in ("alice2", "grafana", "root"):
        body = await overview(house, headers=bearer(name))
        ids = [(one["tenant"], one["request_id"]) for one in body["requests"]]
        seen[name] = (ids, body["workers"][0]["leases"][0]["request_id"])
    assert seen["alice2"] == ([("alice", "hers")], None)
    assert seen["grafana"] == ([], None)
    assert seen["root"] == ([("bob", "his"), ("alice", "hers")], "bob/his")


async def test_the_command_needs_the_admin_port_and_a_key_and_says_so(open_house, monkeypatch):
    house = await open_house(api_keys=FILE)
    worker = await house.add(prompt=len(PROMPT))
    worker.status = answer_of(worker)
    app = house.app

    async def said(port: int, key: str = "") -> str:
        monkeypatch.setenv("DISAGG_API_KEY", KEYS.get(key, key))
        with pytest.raises(RemoteFault) as raised:
            await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}", BOUND_S)
        return raised.value.message

    assert "answered 401: DISAGG_API_KEY needs a key that may observe" in await said(app.admin_port)
    assert "answered 401" in await said(app.admin_port, "revoked")
    assert "answered 403: DISAGG_API_KEY needs" in await said(app.admin_port, "alice")
    assert "answered 404: this is not the admin port" in await said(app.http_port, "grafana")
    assert "router.admin_port" in await said(app.grpc_port, "grafana")
    assert "no router answers at http://127.0.0.1:1/" in await said(1, "grafana")
    monkeypatch.setenv("DISAGG_API_KEY", KEYS["grafana"])
    body = await asyncio.to_thread(fetch, f"http://127.0.0.1:{app.admin_port}/", BOUND_S)
    assert is_well(body)
    await worker.stop()
    await house.until(lambda: not app.dispatcher.core.fleet, "the loss")
    gone = await asyncio.to_thread(fetch, f"http://127.0.0.1:{app.admin_port}", BOUND_S)
    assert not is_well(gone)


@pytest.mark.parametrize("path", [STATUS, EVENTS])
async def test_it_needs_a_key_that_may_observe_and_is_not_on_the_clients_port(open_house, path):
    house = await open_house(api_keys=FILE)
    assert (await house.admin.get(path)).status_code == 401
    assert (await house.admin.get(path, headers=bearer("bob"))).status_code == 403
    assert (await house.http.get(path, headers=bearer("root"))).status_code == 404
    assert (await house.admin.get(f"{path}?key=x", headers=bearer("root"))).status_code == 400


async def test_events_are_whole_and_go_on_until_the_router_stops(house):
    async with house.admin.stream("GET", EVENTS) as response:
        assert response.headers["content-type"] == "text/event-stream"
        got = events(response)
        first = await anext(got)
        assert first["workers"][0]["worker_id"] == "w1"
        second = await anext(got)
        assert second["now_ms"] > first["now_ms"]
        house.app.dispatcher.drain()
        while (await anext(got))["router"]["status"] != "stopping":
            pass  # who looks on sees the drain
        stopping = asyncio.create_task(house.app.stop())
        async with asyncio.timeout(BOUND_S):
            rest = [one async for one in got]  # the end of a whole answer, no broken connection
            assert len(rest) <= 1
            await stopping


async def test_observers_are_bounded_and_one_that_leaves_makes_room(open_house):
    house = await open_house(observers_max=1)
    async with house.admin.stream("GET", EVENTS) as response:
        await anext(events(response))
        refused = await house.admin.get(EVENTS)
        assert refused.status_code == 429
        assert "limits.observers_max" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        assert (await house.admin.get(STATUS)).status_code == 200
    async with asyncio.timeout(BOUND_S):
        while True:
            async with house.admin.stream("GET", EVENTS) as response:
                if response.status_code == 200:
                    return
            await asyncio.sleep(0.01)


async def test_streams_go_on_while_a_large_fleet_is_told(open_house, monkeypatch):
    house = await open_house()
    for name in ("w1", "w2", "w3"):
        await house.add(name)
    told_in = []
    for piece_bytes in (1, 1 << 30):
        monkeypatch.setattr(overview_module, "PIECE_BYTES", piece_bytes)
        task = asyncio.create_task(house.app._admin._live._overview.json(ANYBODY, {}))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert len(json.loads(await task)["workers"]) == 3
        told_in.append(num_turns)
    assert told_in == [4, 1], "the second is the control"


async def test_what_many_look_at_is_made_once(house, monkeypatch):
    live = house.app._admin._live
    made = []

    async def make(caller, answers):
        made.append((caller.tenant, sorted(caller.scopes)))
        return b"{}"

    monkeypatch.setattr(live._overview, "json", make)
    one, other = Caller("one", "a", OBSERVERS), Caller("one", "b", frozenset((OBSERVE,)))
    await asyncio.gather(*(live._shown(caller) for caller in (one, one, other, other, ANYBODY)))
    assert made == [("one", ["admin", "observe"]), ("one", ["observe"]), ("", sorted(SCOPES))]
    live._made = {who: (0.0, task) for who, (_, task) in live._made.items()}
    await live._shown(one)
    assert (len(made), len(live._made)) == (4, 1), "later it is made anew, and nothing is kept"


async def test_a_revoked_key_sees_no_further_event(open_house):
    house = await open_house(api_keys=FILE)
    async with house.admin.stream("GET", EVENTS, headers=bearer("grafana")) as response:
        got = events(response)
        await anext(got)
        kept = json.loads(FILE)
        kept["keys"] = [one for one in kept["keys"] if one["name"] != "grafana"]
        house.app._keys.ring.replace(json.dumps(kept).encode())
        async with asyncio.timeout(BOUND_S):
            assert len([one async for one in got]) <= 1


async def test_nobody_is_asked_where_nobody_looks(house):
    (worker,) = house.workers
    async with house.admin.stream("GET", EVENTS) as response:
        got = events(response)
        await anext(got)
        await anext(got)
    live = house.app._admin._live
    await house.until(lambda: not live._num_observers, "the observer has left")
    asked = worker.num_asked
    assert asked >= 2
    await house.admin.get("/health")
    assert worker.num_asked == asked


async def test_the_page_is_served_without_a_key_and_may_load_nothing_from_elsewhere(open_house):
    house = await open_house(api_keys=FILE)
    for path in FILES:
        answer = await house.admin.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), path
        assert (await house.http.get(path)).status_code == 401  # nothing of it for clients
    page = (await house.admin.get("/")).text
    assert " style=" not in page
    assert "<script>" not in page
    assert (await house.admin.get("/live/../admin.py")).status_code == 401


async def test_the_head_of_the_events_has_an_end(open_house):
    house = await open_house(observers_max=1)
    for _ in range(3):  # on one connection, and nobody follows them
        async with asyncio.timeout(BOUND_S):
            response = await house.admin.head(EVENTS)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
