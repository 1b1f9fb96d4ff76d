"""A router that leaves its port to another one: who has connected is served."""

import asyncio

from tests.unit.router.scripted_worker import BOUND_S

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def status_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(BOUND_S):
        return (await reader.readline()).split()[1]


async def test_who_was_accepted_at_that_moment_is_served(house, monkeypatch):
    """The moment between accept and beginning is met by holding asyncio there."""
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), asyncio.Event()
    begin = loop._accept_connection2  # type: ignore[attr-defined]

    async def begin_later(*arguments, **named):
        begun.set()
        await go_on.wait()
        await begin(*arguments, **named)

    monkeypatch.setattr(loop, "_accept_connection2", begin_later)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.app.http_port)
    writer.write(GET)
    async with asyncio.timeout(BOUND_S):
        await begun.wait()
    go_on.set()  # it goes on in one of the next turns
    await house.app._http_server.stop_listening()
    assert await status_of(reader) == b"200"
    writer.close()


async def test_a_port_that_is_left_takes_nobody_else_and_keeps_who_is_there(house):
    reader, writer = await asyncio.open_connection("127.0.0.1", house.app.http_port)
    writer.write(GET)
    assert await status_of(reader) == b"200"
    await house.app._http_server.stop_listening()
    try:
        await asyncio.open_connection("127.0.0.1", house.app.http_port)
    except ConnectionRefusedError:
        pass
    else:
        raise AssertionError("somebody is taken in")
    writer.write(GET)
    assert await reader.readuntil(b"200 OK")
    writer.close()
