"""What waits for a worker goes to it in one message, if it takes that."""

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.session import Cancel


@pytest.mark.parametrize("takes_batches", [True, False])
async def test_messages_of_one_turn_go_together_to_who_takes_them(open_house, takes_batches):
    house = await open_house()
    worker = await house.add(takes_batches=takes_batches)
    (session,) = house.app.dispatcher.sessions
    assert worker.opened[0].takes_batches, "the router always does"
    cancels = [Cancel(RequestKey(f"r{number}", 1, "x"), "a test") for number in range(5)]
    before = worker.num_read
    for cancel in cancels:
        session.send(cancel)
    await worker.until(lambda: len(worker.cancels) == 5, "all cancels")
    assert [one.key.request_id for one in worker.cancels] == [f"r{number}" for number in range(5)]
    assert worker.num_read - before == (1 if takes_batches else 5)


@pytest.mark.parametrize("takes_batches", [True, False])
async def test_an_answer_is_the_same_either_way(open_house, takes_batches):
    house = await open_house()
    await house.add(takes_batches=takes_batches)
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 12}
    answer = (await house.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == house.tokenizer.decode(house.script[:12])
