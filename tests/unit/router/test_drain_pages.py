"""The page by which operators drain: whom it finds, and whom it refuses."""

PATH = "/v1/disagg/drain"


async def refused(house, **body):
    answer = await house.admin.put(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


async def test_an_unknown_name_says_what_there_is(house):
    param, message = await refused(house, name="w9")
    assert param == "name"
    assert message == "name: 'w9' is no worker and no host; workers: w1; hosts: 127.0.0.1"


async def test_a_worker_of_an_older_release_is_refused_and_goes_on(house):
    """It would end its session at a message it does not know."""
    for name in ("w1", "127.0.0.1"):
        param, message = await refused(house, name=name)
        assert param == "name"
        assert message.startswith("name: worker w1 is too old")
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
    assert (await house.http.post("/v1/completions", json=body)).status_code == 200


async def test_bodies_are_refused_by_field(house):
    assert (await refused(house))[0] == "name"
    assert (await refused(house, name="w1", timeout_ms=-1))[0] == "timeout_ms"
    assert (await refused(house, name="w1", when="now"))[0] == "when"
    assert (await refused(house, name="w1", undo=True))[0] == "name"  # too old, before all else
