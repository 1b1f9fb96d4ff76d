"""How long READs and messages take: between this process and one that it starts."""

import asyncio
import contextlib
import multiprocessing
import signal
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import grpc
import numpy as np
import torch

from disagg.cluster.processes import end_with_parent
from disagg.commands.rounds import Say
from disagg.errors import RemoteFault
from disagg.routing.estimates.least_squares import solve
from disagg.routing.estimates.place import LinkCost
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.channel import CHANNEL_OPTIONS
from disagg.workers.nixl_transport import NixlTransport
from disagg.workers.pool_region import PoolRegion

REGION_BYTES = 64 << 20
"""Of each side: the largest READ that is measured, or one block."""
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
START_S, ANSWER_S = 120.0, 60.0
MESSAGES = 300
MESSAGE = bytes(200)
_METHOD = "/disagg.Calibration/Echo"

Point = tuple[int, float]
"""Bytes and milliseconds."""


def measure_links(
    block_bytes: int, device: str, handle_bytes_max: int, repeats: int, say: Say
) -> tuple[LinkCost, list[Point], float]:
    """READs between two processes on this machine, and one way of a message.

    Args:
        block_bytes: of a KV block.
        device: where the pools are, ``cpu`` or ``cuda``.
        handle_bytes_max: as ``transfer.read_handle_bytes_max``.
        repeats: of every size; the median counts.
        say: takes what is measured now.

    Returns:
        The fit, the points that it was fitted to, and a message's milliseconds.

    Raises:
        RemoteFault: the other process does not answer, or a READ fails.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(
        target=serve_peer, args=(theirs, block_bytes, device, handle_bytes_max), daemon=True
    )
    # Of a terminal's Ctrl-C it hears nothing: it ends with this process, without a word.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer.start()
    signal.signal(signal.SIGINT, before)
    theirs.close()
    try:
        pool, port = _answer(pipe)
        say("READs between two processes")
        points = _reads(pool, block_bytes, device, handle_bytes_max, repeats)
        say("messages between two processes")
        hop_ms = asyncio.run(_hop_ms(port))
        pipe.send("end")
        peer.join(10)
    except (EOFError, OSError) as error:
        raise RemoteFault(f"the other process of the measurement has ended: {error!r}") from error
    finally:
        if peer.is_alive():
            peer.kill()
            peer.join()
    return link_fit(points), points, hop_ms


def link_fit(points: Sequence[Point]) -> LinkCost:
    """A READ's constant and time per MiB, by which no point is far off as a share of its time."""
    products, timed = [0.0] * 3, [0.0] * 2
    for num_bytes, ms in points:
        features = (1 / ms, num_bytes / (1 << 20) / ms)
        for number, (left, right) in enumerate(((0, 0), (0, 1), (1, 1))):
            products[number] += features[left] * features[right]
        for number, feature in enumerate(features):
            timed[number] += feature
    read_ms, mib_ms = solve(2, products, timed)
    return LinkCost(read_ms or 0.0, mib_ms or 0.0)


def _answer(pipe: "Connection[Any, Any]") -> tuple[PoolInfo, int]:
    if not pipe.poll(START_S):
        raise RemoteFault(f"the other process of the measurement says nothing for {START_S:g} s")
    found = pipe.recv()
    if isinstance(found, str):
        raise RemoteFault(f"the other process of the measurement: {found}")
    pool, port = found
    return pool, port


def _region(block_bytes: int, device: str) -> PoolRegion:
    num_blocks = max(2, REGION_BYTES // block_bytes)
    memory = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
    memory += 1  # its pages are there
    kind = memory.device.type == "cuda"
    return PoolRegion(
        memory.data_ptr(),
        num_blocks,
        block_bytes,
        "VRAM" if kind else "DRAM",
        memory.device.index or 0 if kind else 0,
        memory,
    )


def _reads(
    pool: PoolInfo, block_bytes: int, device: str, handle_bytes_max: int, repeats: int
) -> list[Point]:
    ended = threading.Event()
    errors: list[str] = []

    def done(read_id: int, error: str) -> None:
        if error:
            errors.append(error)
        ended.set()

    region = _region(block_bytes, device)
    transport = NixlTransport(
        "calibration:reader", region, on_read_done=done, handle_bytes_max=handle_bytes_max
    )
    transport.add_peer("calibration:owner", [pool])
    points: list[Point] = []
    chance = np.random.default_rng(0)
    for size in SIZES:
        num = min(max(1, size // block_bytes), region.num_blocks - 1)
        took: list[float] = []
        for number in range(repeats + 1):  # the first READ of all connects
            blocks = 1 + chance.permutation(region.num_blocks - 1)[:num]
            ended.clear()
            began_s = time.perf_counter()
            transport.read(number, "calibration:owner", blocks.tolist(), blocks.tolist())
            if not ended.wait(ANSWER_S):
                raise RemoteFault(f"a READ of {num} blocks takes longer than {ANSWER_S:g} s")
            if errors:
                raise RemoteFault(f"a READ failed: {errors[0]}")
            took.append((time.perf_counter() - began_s) * 1000)
        point = num * block_bytes, statistics.median(took[1:])
        if not points or points[-1][0] != point[0]:
            points.append(point)
    transport.close(5.0)
    return points


async def _hop_ms(port: int) -> float:
    """Half of the way there and back on a stream, as between router and worker."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
        # The stubs want what a generated stub passes: here bytes are sent as they are.
        call = cast(Any, channel).stream_stream(_METHOD)()
        took: list[float] = []
        for _ in range(MESSAGES):
            began_s = time.perf_counter()
            await call.write(MESSAGE)
            await asyncio.wait_for(call.read(), ANSWER_S)
            took.append((time.perf_counter() - began_s) * 1000)
        await call.done_writing()
    return statistics.median(took) / 2


# --- in the other process


def serve_peer(
    pipe: "Connection[Any, Any]", block_bytes: int, device: str, handle_bytes_max: int
) -> None:
    """Lend memory to READs, and send messages back, until the other side says so or has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)
    try:
        transport = NixlTransport(
            "calibration:owner",
            _region(block_bytes, device),
            on_read_done=lambda read_id, error: None,
            handle_bytes_max=handle_bytes_max,
        )
        asyncio.run(_echo(pipe, transport.local_pools()[0]))
        transport.close(5.0)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


async def _echo(pipe: "Connection[Any, Any]", pool: PoolInfo) -> None:
    async def echo(
        messages: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    service, method = _METHOD[1:].split("/")
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send((pool, port))
    with contextlib.suppress(EOFError, OSError):  # whoever measured may have ended
        await asyncio.to_thread(pipe.recv)
    await server.stop(0)
