"""What one client may take of the router: each bound, the error that names it, and its control."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import grpc
import pytest

from disagg.errors import CapacityError
from disagg.router.callers import ANYBODY
from disagg.router.http_exchange import BodyBudget
from disagg.wire.v1 import router_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from tests.unit.router.scripted_worker import BOUND_S
from tests.unit.router.test_connections import ASKING, connect, until_closed
from tests.unit.router.test_http_errors import COMPLETION, check_error

POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


# --- heads


async def test_a_head_is_bounded_in_bytes_however_it_comes(open_house):
    house = await open_house(header_bytes_max=2000)
    for size in (1500, 3000, 300_000):
        answer = await house.http.get("/health", headers={"x-long": "y" * size})
        if size == 1500:
            assert answer.status_code == 200
            continue
        check_error(answer, 431, None, "request_header_fields_too_large")
        assert "limits.header_bytes_max" in answer.text
    reader, writer = await connect(house)
    writer.write(b"GET /health HTTP/1.1\r\nx-long: " + b"y" * 3000)  # and no end of it
    said = await until_closed(reader)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert b"limits.header_bytes_max" in said
    writer.close()


async def test_headers_are_counted(open_house):
    house = await open_house(headers_max=20)
    for num, status in ((10, 200), (30, 431)):
        headers = {f"x-{n}": "y" for n in range(num)}
        answer = await house.http.get("/health", headers=headers)
        assert answer.status_code == status
    check_error(answer, 431, None, "request_header_fields_too_large")
    assert "limits.headers_max" in answer.text


async def test_what_is_no_http_is_answered_in_the_same_shape(house):
    reader, writer = await connect(house)
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    said = await until_closed(reader)
    assert said.startswith(b"HTTP/1.1 400 ")
    error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    writer.close()


async def test_one_connection_too_many_is_told_why_and_when(open_house):
    house = await open_house(connections_max=1)
    asked, held = await connect(house)
    held.write(ASKING)
    assert (await asked.readline()).startswith(b"HTTP/1.1 100 ")
    reader, writer = await connect(house)
    head, _, body = (await until_closed(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"retry-after: 1" in head
    error = json.loads(body)["error"]
    assert "limits.connections_max" in error["message"]
    assert error["code"] == "too_many_connections"
    writer.close()
    held.close()


# --- slow senders


async def send_slowly(house, pause_s: float, size: int):
    """Send a body a piece at a time for as long as the router takes it; return its answer."""
    body = json.dumps(COMPLETION).encode().ljust(4000)
    reader, writer = await connect(house)
    writer.write(POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    answer = asyncio.create_task(reader.readuntil(b"}}"))  # a reset may follow what is refused
    while body and not answer.done():
        writer.write(body[:size])
        body = body[size:]
        await asyncio.sleep(pause_s)
    async with asyncio.timeout(BOUND_S):
        said = await answer
    writer.close()
    return said


async def test_a_body_that_drips_is_cut_off_and_one_that_keeps_the_rate_is_not(open_house):
    limits = {"receive_timeout_ms": 500, "receive_bytes_per_s_min": 2000}
    house = await open_house(**limits)
    await house.add()
    said = await send_slowly(house, 0.02, 4)  # 200 bytes/s, never still for long
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"limits.receive_bytes_per_s_min" in said
    lenient = await open_house(**(limits | {"receive_bytes_per_s_min": 0}))  # control
    await lenient.add()
    assert (await send_slowly(lenient, 0.01, 40)).startswith(b"HTTP/1.1 200 ")


def test_a_tenant_leaves_room_for_the_bodies_of_others():
    budget = BodyBudget(1000)
    with contextlib.suppress(CapacityError):
        while True:
            budget.take("one", 1)
    for tenant in ("two", "three"):
        for _ in range(12):
            budget.take(tenant, 1)
    with pytest.raises(CapacityError):  # control: it is bounded
        budget.take("four", 1000)
    assert 0 < budget._used["one"] <= 750
    budget.give_back("one", budget._used["one"])
    budget.take("two", 500)


async def test_bodies_of_all_connections_together_are_bounded(house, monkeypatch):
    budget = house.app._http_server.config.app._generation._bodies._budget
    monkeypatch.setattr(budget, "_bytes_max", 1000)
    body = json.dumps(COMPLETION).encode()
    held, large = await connect(house), await connect(house)
    held[1].write(POST + b"content-length: 2000\r\n\r\n" + body)
    await house.until(lambda: budget._used.total(), "its bytes to be taken")
    large[1].write(POST + b"content-length: 2000\r\n\r\n" + body.ljust(900))
    assert (await large[0].readuntil(b"}}")).startswith(b"HTTP/1.1 429 ")
    whole = await house.http.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 500})
    assert whole.status_code != 429  # what has come whole takes no room
    for _, writer in (held, large):
        writer.close()
    await house.until(lambda: not budget._used, "what was taken to be given back")


# --- slow readers


METRICS = b"/metrics"
"""A large page, of the admin port."""


def never_reads(house, path: bytes, body: dict[str, Any] | None = None) -> socket.socket:
    """A client with the smallest of receive buffers that sends a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    port = house.app.admin_port if path == METRICS else house.app.http_port
    client.connect(("127.0.0.1", port))
    data = json.dumps(body).encode() if body else b""
    method = b"POST" if body else b"GET"
    client.sendall(
        b"%s %s HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nx-request-id: slow\r\n"
        b"content-length: %d\r\n\r\n" % (method, path, len(data)) + data
    )
    return client


STREAM = COMPLETION | {"stream": True, "max_tokens": 480, "logprobs": 5}
MANY = 20_000
"""Tokens that all buffers on the way to a client together never hold."""


async def feed_until_cancelled(house, worker) -> None:
    """Let a token come when those before it have been delivered: however fast the worker is."""
    core, num = house.app.dispatcher.core, 0
    await worker.until(lambda: worker.submits, "the submit")
    request_id = worker.submits[0].key.request_id
    while not core.record(request_id).outcome:
        num += 1
        worker.gate.release()
        await house.until(
            lambda num=num: (
                core.record(request_id).outcome or core.record(request_id).num_tokens >= num
            ),
            f"token {num}",
        )
    await worker.until(lambda: worker.cancels, "the cancel")
    assert worker.num_sent < MANY


async def test_a_stream_that_nobody_reads_is_cancelled_at_the_workers(open_house):
    house = await open_house(unread_tokens_max=50, send_buffer_bytes=4096)
    worker = await house.add(max_model_tokens=2 * MANY, gate=asyncio.Semaphore(0))
    client = never_reads(house, b"/v1/completions", STREAM | {"max_tokens": MANY})
    try:
        await feed_until_cancelled(house, worker)
        assert worker.cancels[0].reason == "the client reads too slowly"
        record = house.app.dispatcher.core.record("slow")
        assert record.outcome == "cancelled"
        # It reads at last: what was sent, then an error instead of an end.
        client.settimeout(BOUND_S)
        said = await asyncio.to_thread(read_until, client, b"limits.unread_tokens_max")
        assert b'"code":"slow_reader"' in said
        assert b"[DONE]" not in said
    finally:
        client.close()


def read_until(client: socket.socket, end: bytes) -> bytes:
    said = b""
    while end not in said:
        data = client.recv(65536)
        assert data, said[-1000:]
        said += data
    return said


async def test_a_stream_that_is_read_goes_on(open_house):
    """Control: the same bounds, and a client that reads."""
    house = await open_house(unread_tokens_max=50, send_buffer_bytes=4096)
    worker = await house.add()
    answer = await house.http.post("/v1/completions", json=STREAM)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert worker.cancels == []


async def test_a_client_that_takes_nothing_is_cut_off(open_house):
    house = await open_house(send_timeout_ms=300, send_buffer_bytes=4096)
    worker = await house.add()
    client = never_reads(house, b"/v1/completions", STREAM)
    state = house.app._http_server.server_state
    await worker.until(lambda: worker.submits, "the submit")
    await house.until(lambda: not state.connections, "the connection cut")
    client.close()
    await house.until(lambda: not house.app.dispatcher.core.num_live, "the request ended")


async def test_a_finished_answer_that_nobody_takes_is_cut_off_too(open_house):
    house = await open_house(send_timeout_ms=300, send_buffer_bytes=4096)
    state = house.app._admin_server.server_state
    clients = [never_reads(house, METRICS) for _ in range(3)]
    await house.until(lambda: len(state.connections) == 3, "the connections")
    await house.until(lambda: not state.connections, "the connections cut")
    for client in clients:
        client.close()


async def test_a_slow_reader_that_keeps_the_rate_gets_all(open_house):
    house = await open_house(send_timeout_ms=30_000, send_bytes_per_s_min=1, send_buffer_bytes=4096)
    whole = (await house.admin.get("/metrics")).content
    client = never_reads(house, METRICS)
    client.settimeout(BOUND_S)

    def read_slowly() -> bytes:
        said = b""
        while len(said) < len(whole) - 500:  # counters grow by a digit
            data = client.recv(1024)
            assert data, "cut off"
            said += data
        return said

    assert (await asyncio.to_thread(read_slowly)).startswith(b"HTTP/1.1 200 ")
    client.close()


async def test_a_grpc_client_that_does_not_read_is_given_up(open_house):
    house = await open_house(unread_tokens_max=40, send_timeout_ms=500)
    worker = await house.add(max_model_tokens=2 * MANY, gate=asyncio.Semaphore(0))
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    address = f"127.0.0.1:{house.app.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = RouterStub(channel)
        request = router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6])
        request.sampling.max_tokens = MANY
        request.sampling.num_logprobs = 20
        call = stub.Generate(request)
        await feed_until_cancelled(house, worker)
        call.cancel()
    await house.until(
        lambda: not house.app._http_server.config.app._generation._streams._keys, "no stream"
    )


# --- sizes


async def test_a_prompt_is_bounded_in_bytes_before_it_is_tokenised(open_house, monkeypatch):
    house = await open_house(prompt_bytes_max=100)
    await house.add()
    monkeypatch.setattr(house.app._tokenizer, "encode", None)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "é" * 60}]}
    for path, body, param in (
        ("/v1/completions", COMPLETION | {"prompt": "é" * 60}, "prompt"),
        ("/v1/chat/completions", chat, "messages"),
    ):
        answer = await house.http.post(path, json=body)
        check_error(answer, 400, param, "invalid_value")
        assert "limits.prompt_bytes_max" in answer.text
    monkeypatch.undo()
    answer = await house.http.post("/v1/completions", json=COMPLETION | {"prompt": "a" * 60})
    assert answer.status_code == 200


@pytest.mark.parametrize("prompt", [[5] * 11, "the cat sat on the mat and the rat ran. " * 3])
async def test_a_prompt_is_bounded_in_tokens(open_house, prompt):
    house = await open_house(prompt_tokens_max=10)
    worker = await house.add()
    answer = await house.http.post("/v1/completions", json=COMPLETION | {"prompt": prompt})
    check_error(answer, 400, "prompt", "context_length_exceeded")
    assert "limits.prompt_tokens_max" in answer.text
    assert worker.submits == []
    answer = await house.http.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 10})
    assert answer.status_code == 200


async def test_what_a_request_generates_is_bounded(open_house):
    house = await open_house(generation_tokens_max=20)
    worker = await house.add()
    answer = await house.http.post("/v1/completions", json=COMPLETION | {"max_tokens": 21})
    check_error(answer, 400, "max_tokens", "invalid_value")
    assert "limits.generation_tokens_max" in answer.text
    assert worker.submits == []
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}]}
    answer = await house.http.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] <= 20  # a default is lowered, not refused
    assert worker.submits[0].sampling.max_tokens == 20


# --- requests in progress


async def test_requests_of_one_key_are_bounded_over_http_and_grpc(open_house):
    house = await open_house(streams_per_key_max=2)
    gate = asyncio.Semaphore(0)
    worker = await house.add(gate=gate)
    held = asyncio.create_task(house.http.post("/v1/completions", json=COMPLETION))
    await worker.until(lambda: worker.submits, "the first submit")
    half, writer = await connect(house)  # a request whose body has not come yet counts
    writer.write(POST + b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n")
    assert (await half.readline()).startswith(b"HTTP/1.1 100 ")
    answer = await house.http.post("/v1/completions", json=COMPLETION)
    check_error(answer, 429, None, "rate_limit_exceeded")
    assert "limits.streams_per_key_max" in answer.text
    assert answer.headers["retry-after"] == "1"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        stub: Any = RouterStub(channel)
        call = stub.Generate(router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing: Any = caught.value.trailing_metadata()
        assert ("retry-after", "1") in [tuple(one) for one in trailing]
    assert (await house.http.get("/health")).status_code == 200
    writer.close()
    streams = house.app._http_server.config.app._generation._streams
    await house.until(lambda: streams.num_open(ANYBODY.at("127.0.0.1")) == 1, "one request less")
    for _ in range(6):
        gate.release()
    assert (await held).status_code == 200
    assert (await house.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_whoever_is_to_come_again_is_told_when(open_house):
    house = await open_house()
    for answer in (
        await house.http.post("/v1/completions", json=COMPLETION),
        await house.http.get("/ready"),
    ):
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    await house.add()
    answer = await house.http.post("/v1/completions", json=COMPLETION)  # control
    assert "retry-after" not in answer.headers
