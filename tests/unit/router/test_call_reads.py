"""gRPC requests that do not come whole: how many are waited for, and who waits behind them."""

import asyncio
import contextlib

import grpc
import pytest

from disagg.errors import CapacityError
from disagg.router import call_reads
from disagg.router.call_reads import READS_MAX, CallReads
from disagg.router.callers import NOBODY, Caller
from disagg.wire.v1 import router_pb2
from tests.unit.router.scripted_worker import BOUND_S
from tests.unit.router.test_connection_shares import FILE, KEYS

GENERATE = "/disagg.wire.v1.Router/Generate"


def one_request() -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6])
    request.sampling.max_tokens = 3
    return request


async def nothing():
    """A call's requests of which none comes."""
    await asyncio.Event().wait()
    yield b""


def generate(channel: grpc.aio.Channel, name: str, requests):
    """A call as one with a stream of requests, which may be any."""
    method = channel.stream_stream(GENERATE, None, None)
    return method(requests, metadata=(("authorization", f"Bearer {KEYS[name]}"),))


async def whole():
    yield one_request().SerializeToString()


async def is_answered(call, timeout_s: float = BOUND_S) -> bool:
    """Whether the first part of its answer comes in time."""
    done, _ = await asyncio.wait([asyncio.create_task(call.read())], timeout=timeout_s)
    return bool(done) and isinstance(done.pop().result(), bytes)


@pytest.mark.parametrize("is_bounded", [True, False], ids=["bounded", "control"])
async def test_who_sends_no_requests_keeps_the_own_tenant_waiting_alone(
    open_house, monkeypatch, is_bounded
):
    if not is_bounded:
        monkeypatch.setattr(call_reads, "READS_MAX", 10**6)
    house = await open_house(api_keys=FILE, streams_per_key_max=READS_MAX + 2)
    await house.add()
    reads = house.app._key_check._reads
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        held = [generate(channel, ("alice", "alice2")[n % 2], nothing()) for n in range(READS_MAX)]
        await house.until(lambda: num_calls(reads) == READS_MAX, "calls without a request")
        assert await is_answered(generate(channel, "bob", whole()))
        waits = generate(channel, "alice", whole())
        first = asyncio.create_task(waits.read())
        await asyncio.wait([first], timeout=0.5)
        assert first.done() is not is_bounded
        if is_bounded:
            held.append(generate(channel, "alice", nothing()))
            await house.until(lambda: num_calls(reads) == READS_MAX + 2, "as many as may wait")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel, "alice", whole()).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "limits.streams_per_key_max" in str(caught.value.details())
        held[0].cancel()
        async with asyncio.timeout(BOUND_S):
            assert isinstance(await first, bytes)
        for call in held:
            call.cancel()
        await house.until(lambda: not reads._holders, "all to be forgotten")


def num_calls(reads: CallReads) -> int:
    return sum(one.num_calls for one in reads._holders.values())


async def test_a_call_without_any_request_is_refused(open_house):
    house = await open_house(api_keys=FILE)

    async def none():
        return
        yield b""

    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, "alice", none()).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no request" in str(caught.value.details())


async def test_turns_are_of_a_tenant_or_of_a_network():
    reads = CallReads(READS_MAX)
    alice, same, bob = (Caller(name, key, frozenset()) for name, key in ("aa", "ab", "ba"))
    async with contextlib.AsyncExitStack() as held:
        for number in range(READS_MAX):
            await held.enter_async_context(reads.turn((alice, same)[number % 2]))
        with pytest.raises(CapacityError):
            await held.enter_async_context(reads.turn(alice))
        for other in (bob, NOBODY.at("10.0.0.1"), NOBODY.at("10.0.0.2")):
            await held.enter_async_context(reads.turn(other))
    assert not reads._holders
