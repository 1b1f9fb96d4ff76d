"""What carrying a request's messages takes: ``python -m benchmarks.router.messages``.

A request that is handed over has four: a submit to each of two workers, and what each answers (here
as bytes of that size, at once). CPU microseconds per request of a process that does nothing else,
one at a time and 16 at once: by grpc.aio, as the router does it, and by asyncio's own sockets with
a length before each message. The second has no TLS, no pings and no flow control; what it takes
less is the price of gRPC's threads, each of which wakes the next one for every message.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from benchmarks.router.floor import serve_method
from benchmarks.servers.program import free_port

SUBMIT, ANSWER = b"s" * 330, b"a" * 130
NUM_WORKERS = 2
NUM_CALLERS = (1, 16)
WARM_S, MEASURED_S, ROUNDS = 1.0, 2.0, 5
LENGTH, NUMBER = struct.Struct("!I"), struct.Struct("!Q")
Send = Callable[[bytes], object]


class Frames(asyncio.Protocol):
    """Messages with their length before them, on one connection."""

    def __init__(self, got: Callable[["Frames", bytes], None]) -> None:
        self._got, self._rest = got, b""

    def connection_made(self, transport: Any) -> None:
        """Keep the way out."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand on the messages that are whole."""
        data, at = self._rest + data, 0
        while len(data) >= at + LENGTH.size:
            end = at + LENGTH.size + LENGTH.unpack_from(data, at)[0]
            if len(data) < end:
                break
            self._got(self, data[at + LENGTH.size : end])
            at = end
        self._rest = data[at:]

    def send(self, message: bytes) -> None:
        """Send one."""
        self._transport.write(LENGTH.pack(len(message)) + message)


async def answer_frames(port: int) -> None:
    """Be a worker on a socket, until the process is ended."""

    def got(frames: Frames, message: bytes) -> None:
        frames.send(message[: NUMBER.size] + ANSWER)

    loop = asyncio.get_running_loop()
    await (await loop.create_server(lambda: Frames(got), "127.0.0.1", port)).serve_forever()


async def answer_grpc(port: int) -> None:
    """Be a worker over gRPC, until the process is ended."""

    async def session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message[: NUMBER.size] + ANSWER

    handler = grpc.stream_stream_rpc_method_handler(session)
    await serve_method(port, "Worker", "Session", handler)


async def frames_to(port: int, got: Callable[[bytes], None]) -> Send:
    """A session with a worker on a socket."""
    loop = asyncio.get_running_loop()
    _, frames = await loop.create_connection(
        lambda: Frames(lambda _, message: got(message)), "127.0.0.1", port
    )
    return frames.send


async def grpc_to(port: int, got: Callable[[bytes], None]) -> Send:
    """A session with a worker over gRPC."""
    channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    call = channel.stream_stream("/Worker/Session")()
    await call.wait_for_connection()
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def write() -> None:
        while True:
            await call.write(await queue.get())

    async def read() -> None:
        async for message in call:
            got(message)

    tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
    return partial(lambda message, kept: queue.put_nowait(message), kept=(channel, *tasks))


WAYS = {"grpc.aio": (answer_grpc, grpc_to), "sockets": (answer_frames, frames_to)}


async def ask(way: str, ports: list[int], num_callers: int) -> float:
    """CPU seconds per request of this process."""
    waiting: dict[int, tuple[asyncio.Future[None], list[bytes]]] = {}
    numbers, num = itertools.count(), 0

    def got(message: bytes) -> None:
        number = NUMBER.unpack_from(message)[0]
        whole, answers = waiting[number]
        answers.append(message)
        if len(answers) == NUM_WORKERS:
            del waiting[number]
            whole.set_result(None)

    sends = [await WAYS[way][1](port, got) for port in ports]

    async def call() -> None:
        nonlocal num
        for number in numbers:
            whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting[number] = whole, []
            for send in sends:
                send(NUMBER.pack(number) + SUBMIT)
            await whole
            num += 1

    callers = [asyncio.create_task(call()) for _ in range(num_callers)]
    await asyncio.sleep(WARM_S)
    before, began_s = num, time.process_time()
    await asyncio.sleep(MEASURED_S)
    taken_s = (time.process_time() - began_s) / (num - before)
    for caller in callers:
        caller.cancel()
    return taken_s


def measure(way: str, num_callers: int) -> float:
    """The same in a process of its own, with workers of its own."""
    ports = [free_port() for _ in range(NUM_WORKERS)]
    module = [sys.executable, "-m", "benchmarks.router.messages"]
    workers = [
        subprocess.Popen([*module, "--answer", way, str(port)], stderr=subprocess.DEVNULL)
        for port in ports
    ]
    try:
        for port in ports:
            _await_server(port)
        given = [*module, "--ask", way, str(num_callers), *map(str, ports)]
        return float(subprocess.run(given, check=True, capture_output=True, text=True).stdout)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _await_server(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        asyncio.run(WAYS[options.answer[0]][0](int(options.answer[1])))
    elif options.ask:
        way, num_callers, *ports = options.ask
        print(asyncio.run(ask(way, [*map(int, ports)], int(num_callers))), flush=True)
        os._exit(0)  # what is in progress need not end
    else:
        for num_callers in NUM_CALLERS:
            for way in WAYS:
                found = [1e6 * measure(way, num_callers) for _ in range(ROUNDS)]
                print(
                    f"four messages by {way}, {num_callers} at once: {min(found):.1f} "
                    f"(median {statistics.median(found):.1f}) us of CPU",
                    flush=True,
                )
