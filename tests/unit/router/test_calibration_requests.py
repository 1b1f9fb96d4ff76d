"""What `disagg calibrate --fleet` sees of its requests."""

import asyncio

import pytest

from disagg.commands.fleet_requests import RunningFleet, _Stream
from disagg.errors import RemoteFault

NUM_TOKENS = 9


async def test_every_token_is_seen_also_those_without_text(open_house):
    """Whoever is asked for random tokens may answer with ends, which no text shows."""
    house, gate = await open_house(), asyncio.Semaphore(0)
    end = house.tokenizer.eos_token_ids[0]
    await house.add(gate=gate, token=lambda position: end)
    stream = _Stream()
    asked = asyncio.create_task(
        asyncio.to_thread(RunningFleet(house.url, "tiny").stream, [5, 6], stream, NUM_TOKENS)
    )
    for number in range(1, NUM_TOKENS + 1):
        gate.release()
        await house.until(lambda number=number: len(stream.seen_s) == number, "a token")
    assert await asked


async def test_what_the_fleet_refuses_is_said_in_its_words(house):
    fleet = RunningFleet(house.url, "another")
    with pytest.raises(RemoteFault, match=r"answered 404: .*'another' does not exist; 'tiny' is"):
        await asyncio.to_thread(fleet.stream, [5, 6], _Stream(), NUM_TOKENS)


async def test_requests_say_whether_they_are_to_be_handed_over(open_house):
    """Else a fleet's own policy might plan each of them otherwise."""
    house = await open_house()
    await house.add()
    for hand_over in (True, False, None):
        fleet = RunningFleet(house.url, "tiny", hand_over=hand_over)
        request_id = await asyncio.to_thread(fleet.stream, [5, 6], _Stream(), NUM_TOKENS)
        found = house.app.dispatcher.core._live.find(request_id)
        assert found.hand_over is hand_over
