"""gRPC between nodes with mutual TLS beside the same connections without.

``python -m benchmarks.tls [--quick]``: the production ports and channels of two nodes in one
process and one event loop, so CPU time is that of both sides. Three figures each: opening a
connection and one call over it; a message there and back on an open stream, one at a time; CPU time
per message of a step's outputs for 64 sequences, streamed as fast as they go. Both ways take turns
in every round; a figure is the median of the rounds, beside the least and the largest. There is no
target: nothing here is on the way of KV.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from benchmarks.transfer.figures import load
from disagg.messages.identity import RequestKey
from disagg.messages.outputs import SequenceOutput, StepOutputs
from disagg.messages.sampling import TokenLogprobs
from disagg.messages.session import ToRouterMessage
from disagg.tls.authority import create_for_one_run
from disagg.tls.connections import Connections
from disagg.wire.session_codec import session_response_to_wire
from disagg.workers.channel import CHANNEL_OPTIONS

NUM_SEQUENCES = 64
ROUNDS, QUICK_ROUNDS = 11, 3
CONNECTIONS, ROUND_TRIPS, MESSAGES = 20, 300, 2_000
NEW = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
"""A channel of its own connects anew."""


def step_message() -> bytes:
    """What a worker sends its router per step."""
    outputs = tuple(
        SequenceOutput(RequestKey(f"request-{i:032}", 1), 1_000 + i, (i,), (TokenLogprobs(-1.5),))
        for i in range(NUM_SEQUENCES)
    )
    message: ToRouterMessage = StepOutputs(outputs)
    return session_response_to_wire(message).SerializeToString()


class Node:
    """A port of a node with a method that sends back, and one that sends steps."""

    def __init__(self, tls_directory: str) -> None:
        self._connections = Connections(tls_directory)
        self._server = self._connections.server(CHANNEL_OPTIONS)
        self._address = ""
        self._step = step_message()

    async def start(self) -> None:
        """Listen on any free port."""
        handlers = {
            "Back": grpc.stream_stream_rpc_method_handler(self._back),
            "Steps": grpc.unary_stream_rpc_method_handler(self._steps),
        }
        generic = grpc.method_handlers_generic_handler("benchmark", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        port = self._connections.listen(self._server, "127.0.0.1:0")
        self._address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """End what goes on."""
        await self._server.stop(0)

    def channel(self) -> Any:
        """A connection of its own to this node."""
        return self._connections.channel(self._address, NEW)

    async def connect_ms(self) -> float:
        """Milliseconds of a new connection with one call."""
        began = time.perf_counter()
        for _ in range(CONNECTIONS):
            async with self.channel() as channel:
                call = channel.stream_stream("/benchmark/Back")()
                await call.write(b"x")
                await call.read()
        return (time.perf_counter() - began) / CONNECTIONS * 1e3

    async def round_trip_us(self) -> float:
        """Microseconds of a message there and back on an open stream."""
        async with self.channel() as channel:
            call = channel.stream_stream("/benchmark/Back")()
            await call.write(b"x" * 200)
            await call.read()
            began = time.perf_counter()
            for _ in range(ROUND_TRIPS):
                await call.write(b"x" * 200)
                await call.read()
            return (time.perf_counter() - began) / ROUND_TRIPS * 1e6

    async def step_cpu_us(self) -> float:
        """CPU microseconds of both sides per message of a step's outputs."""
        async with self.channel() as channel:
            call = channel.unary_stream("/benchmark/Steps")(b"")
            await call.read()
            began = time.process_time()
            for _ in range(MESSAGES - 1):
                await call.read()
            return (time.process_time() - began) / (MESSAGES - 1) * 1e6

    async def _back(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def _steps(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(MESSAGES):
            yield self._step


async def figures(rounds: int) -> list[dict[str, object]]:
    """One line per figure; a ratio above 1 is better than without TLS."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = [Node(str(create_for_one_run(Path(folder) / "certificates"))), Node("")]
        for node in nodes:
            await node.start()
        found = [
            await figure(name, unit, rounds, [getattr(node, method) for node in nodes])
            for name, unit, method in (
                ("connection and first call", "ms", "connect_ms"),
                ("message there and back", "us", "round_trip_us"),
                ("step of 64 sequences", "us of CPU, both sides", "step_cpu_us"),
            )
        ]
        for node in nodes:
            await node.stop()
    return found


async def figure(
    name: str, unit: str, rounds: int, measures: list[Callable[[], Awaitable[float]]]
) -> dict[str, object]:
    """A line; the two take turns in every round, after one that is not counted."""
    seen: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for values, measure in zip(seen, measures, strict=True):
            value = await measure()
            if number:
                values.append(value)
    ours, peer = (statistics.median(values) for values in seen)
    return {
        "name": f"tls/{name}",
        "ours": round(ours, 2),
        "peer": round(peer, 2),
        "unit": unit,
        "ratio": round(peer / ours, 3),
        "spread": [[round(min(values), 2), round(max(values), 2)] for values in seen],
        "rounds": rounds,
        "target": None,
        "ok": None,
        "peer_name": "the same without TLS",
        "load": load(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    given = parser.parse_args()
    for line in asyncio.run(figures(QUICK_ROUNDS if given.quick else ROUNDS)):
        print(json.dumps(line))
