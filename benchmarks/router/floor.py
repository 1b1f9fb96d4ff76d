"""What Python itself takes of a router: ``python -m benchmarks.router.floor``.

CPU microseconds of this process for its parts without any of ours: a preformatted chunk written by
asyncio to each of 64 connections; a message of a step read from gRPC, per each of its 64 rows; a
small POST answered by a raw ASGI application on uvicorn, by h11 and by httptools, 16 connections.
The other ends are processes of their own, whose CPU does not count. Least of 5 rounds, and the
median.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import grpc
import uvicorn

from benchmarks.servers.program import free_port
from disagg.wire.v1 import outputs_pb2, session_pb2

NUM_STREAMS, NUM_STEPS = 64, 200
NUM_CALLERS, REQUESTS_S = 16, 2.0
WARM_REQUESTS = 200
ROUNDS = 5
METHOD = "/floor/Steps"
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000'
    b',"model":"tiny","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
READER = """
import asyncio, sys
async def drop(port):
    reader, _ = await asyncio.open_connection("127.0.0.1", port)
    while await reader.read(1 << 16): pass
async def main():
    await asyncio.gather(*(drop(int(sys.argv[1])) for _ in range(int(sys.argv[2]))))
asyncio.run(main())
"""
SENDER = "from benchmarks.router.floor import send_steps; import sys; send_steps(int(sys.argv[1]))"
CALLER = "from benchmarks.router.floor import call; import sys; call(int(sys.argv[1]))"


def of_step() -> session_pb2.SessionResponse:
    """What a worker says of a step of all streams."""
    rows = range(NUM_STREAMS)
    step = outputs_pb2.StepOutputs(
        request_ids=[f"request-{row}" for row in rows],
        generations=[1] * NUM_STREAMS,
        positions=[100] * NUM_STREAMS,
        num_tokens=[1] * NUM_STREAMS,
        token_ids=[300] * NUM_STREAMS,
        finish_reasons=[0] * NUM_STREAMS,
        has_logprobs=[False] * NUM_STREAMS,
    )
    return session_pb2.SessionResponse(outputs=step)


def send_steps(port: int) -> None:
    """Serve steps to whoever asks, one each 10 ms (in a process of its own)."""

    async def steps(request: bytes, context: Any) -> None:
        message = of_step().SerializeToString()
        while True:
            await context.write(message)
            await asyncio.sleep(0.01)

    handler = grpc.unary_stream_rpc_method_handler(steps)
    asyncio.run(serve_method(port, "floor", "Steps", handler))


async def serve_method(port: int, service: str, method: str, handler: Any) -> None:
    """Serve one method whose messages are bytes, until the process is ended."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def call(port: int) -> None:
    """Send small requests for ever (in a process of its own)."""
    from benchmarks.router.load import Load, request

    async def main() -> None:
        url = f"http://127.0.0.1:{port}"
        await Load(
            url, request(url, num_tokens=2, stream=False), num=NUM_CALLERS, stream=False
        ).start()
        await asyncio.Event().wait()

    asyncio.run(main())


def _started(code: str, *given: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, given)])


async def write_chunks() -> float:
    """CPU seconds per chunk that asyncio writes to a connection."""
    writers: list[asyncio.StreamWriter] = []
    ready = asyncio.Event()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if len(writers) == NUM_STREAMS:
            ready.set()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    other = _started(READER, port, NUM_STREAMS)
    try:
        await ready.wait()
        began_s = time.process_time()
        for _ in range(NUM_STEPS):
            for writer in writers:
                writer.transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
            await asyncio.sleep(0.01)
        return (time.process_time() - began_s) / (NUM_STEPS * NUM_STREAMS)
    finally:
        other.kill()
        other.wait()
        server.close()


async def read_steps() -> float:
    """CPU seconds per row of a message that grpc.aio reads and protobuf decodes."""
    port = free_port()
    other = _started(SENDER, port)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                METHOD,
                request_serializer=bytes,
                response_deserializer=session_pb2.SessionResponse.FromString,
            )
            steps = call(b"", wait_for_ready=True)
            await steps.read()
            began_s = time.process_time()
            for _ in range(NUM_STEPS):
                message = await steps.read()
                assert isinstance(message, session_pb2.SessionResponse), "it has ended early"
                list(message.outputs.token_ids)
            found_s = (time.process_time() - began_s) / (NUM_STEPS * NUM_STREAMS)
            steps.cancel()
            return found_s
    finally:
        other.kill()
        other.wait()


async def answer_requests(http: Literal["h11", "httptools"]) -> float:
    """CPU seconds per small POST that a raw ASGI application on uvicorn answers."""
    num = 0
    is_warm = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num
        while (await receive()).get("more_body"):
            pass
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(CHUNK))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": CHUNK})
        num += 1
        if num == WARM_REQUESTS:
            is_warm.set()

    port = free_port()
    config = uvicorn.Config(application, port=port, log_level="error", http=http, lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    other = _started(CALLER, port)
    try:
        await is_warm.wait()
        before, began_s = num, time.process_time()
        await asyncio.sleep(REQUESTS_S)
        return (time.process_time() - began_s) / (num - before)
    finally:
        other.kill()
        other.wait()
        server.should_exit = True
        await serving


def figure(name: str, part: Callable[[], Awaitable[float]]) -> str:
    """One line: least and median of the rounds."""
    rounds = [1e6 * asyncio.run(part()) for _ in range(ROUNDS)]  # type: ignore[arg-type]
    return f"{name}: {min(rounds):.1f} (median {statistics.median(rounds):.1f}) us of CPU"


if __name__ == "__main__":
    print(figure("a chunk written to a socket by asyncio", write_chunks), flush=True)
    print(figure("a row of a step read from gRPC", read_steps), flush=True)
    print(figure("a small request on raw ASGI, h11", partial(answer_requests, "h11")), flush=True)
    by_httptools = partial(answer_requests, "httptools")
    print(figure("a small request on raw ASGI, httptools", by_httptools), flush=True)
