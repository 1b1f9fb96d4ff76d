"""When the router is ready, what it says is missing, and the length it promises."""

import dataclasses
from pathlib import Path

import pytest

from disagg.config import read_settings
from disagg.config.options import router_options
from disagg.config.sources import Given
from disagg.routing.fleet import Fleet
from disagg.testing.scripted_worker import HASH_KEY, READY
from tests.unit.router.test_http_errors import COMPLETION

NOT_READY = dataclasses.replace(READY, ready=False)


async def readiness(house):
    response = await house.http.get("/ready")
    body = response.json()
    assert (response.status_code == 200) == body["ready"]
    return body["ready"], body["missing"]


@pytest.mark.parametrize(("first", "second"), [("prefill", "decode"), ("decode", "prefill")])
async def test_ready_needs_a_worker_of_each_role_once(open_house, first, second):
    house = await open_house()
    assert await readiness(house) == (False, ["prefill", "decode"])
    await house.add("w1", role=first)
    assert await readiness(house) == (False, [second])
    # It would serve, alone, if it were asked.
    assert (await house.http.post("/v1/completions", json=COMPLETION)).status_code == 200
    late = await house.add("w2", role=second)
    assert await readiness(house) == (True, [])
    # Later the rest serves everybody: the loss is told, and the router stays ready.
    await late.stop()
    await house.until(lambda: len(house.app.dispatcher.core.fleet) == 1, "the loss")
    assert await readiness(house) == (True, [second])
    await house.workers[0].stop()
    await house.until(lambda: not house.app.dispatcher.core.fleet, "both lost")
    assert await readiness(house) == (False, ["prefill", "decode"])
    await house.add("w3", role=first)
    assert await readiness(house) == (False, [second])


async def test_a_worker_that_is_not_ready_does_not_count(open_house):
    house = await open_house()
    await house.add("w1", role="prefill")
    late = await house.add("w2", role="decode", until_ready=False, stats=NOT_READY)
    await house.until(
        lambda: sum(view.connected for view in house.app.dispatcher.core.fleet) == 2, "connected"
    )
    assert await readiness(house) == (False, ["decode"])
    await late.stop()


async def test_a_worker_for_both_is_enough(open_house):
    house = await open_house()
    await house.add()
    assert await readiness(house) == (True, [])


async def test_only_what_was_asked_for_must_be_there(open_house):
    house = await open_house(roles_wanted=("prefill",))
    await house.add(role="prefill")
    assert await readiness(house) == (True, [])


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "wanted"),
    [
        (1, 1, 0, ("prefill", "decode")),
        (8, 2, 0, ("prefill", "decode")),
        (0, 0, 1, ("prefill", "decode")),
        (1, 0, 0, ("prefill",)),
        (0, 2, 0, ("decode",)),
    ],
)
def test_what_is_wanted_is_what_the_cluster_has(
    model_dir: Path, prefill: int, decode: int, both: int, wanted: tuple[str, ...]
) -> None:
    numbers = {"num_prefill": prefill, "num_decode": decode, "num_both": both}
    flags = {f"cluster.{name}": Given(number, "flag:--set") for name, number in numbers.items()}
    flags["model.dir"] = Given(str(model_dir), "flag:--model")
    flags["cluster.hash_key"] = Given(HASH_KEY, "flag:--set")
    assert router_options(read_settings(flags=flags).settings).roles_wanted == wanted


async def test_models_tell_the_length_that_the_routing_core_serves(house, monkeypatch):
    async def told():
        models = (await house.http.get("/v1/models")).json()["data"]
        one = (await house.http.get("/v1/models/tiny")).json()
        assert models == [one]
        return one["max_model_len"]

    assert await told() == 512
    monkeypatch.setattr(Fleet, "max_model_tokens", lambda *_: 100)  # say, of a small pool
    assert await told() == 100
    body = COMPLETION | {"max_tokens": 99}
    response = await house.http.post("/v1/completions", json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    monkeypatch.setattr(Fleet, "max_model_tokens", lambda *_: 0)  # nobody is ready
    assert await told() is None
