"""What a pull is compared with, inside the same two processes and over the same pools.

`RawOwner` and `RawReader` use NIXL as directly as it can be, `SocketOwner` and `SocketReader` a
plain TCP connection. They live beside a `Node`, see `Node.extra`.
"""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from benchmarks.transfer.node import Node
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.engines.native.paged_pool import region_of
from disagg.workers.nixl_agent import NixlAgent

MIB = 1 << 20
SHAPES = {"one descriptor": 1 << 40, "16 MiB descriptors": 16 * MIB}
"""Bytes per descriptor, each in a handle of its own; all are posted, then polled without sleep."""
BOUND_S = 60.0


class RawOwner:
    """An agent of its own over the node's pool.

    Made as the production agent is: with its default progress thread an idle agent would take a
    core from what is measured in turn with it.
    """

    def __init__(self, node: Node) -> None:
        self._agent = NixlAgent("raw-owner", region_of(node.pool))

    def info(self) -> PoolInfo:
        """Metadata of the agent, and address of its pool."""
        return self._agent.info


class RawReader:
    """READs of the pool's first bytes, prepared before they are timed."""

    def __init__(self, node: Node) -> None:
        self._pool = node.pool
        self._made = NixlAgent("raw-reader", region_of(node.pool))
        self._agent = self._made._agent
        self._lists: dict[tuple[int, int], tuple[object, object, int]] = {}

    def connect(self, info: PoolInfo) -> None:
        """Connect to the owner."""
        self._made.add_peer("raw-owner", info)
        self._address = info.pool_address

    def read_s(self, num_bytes: int, shape: str) -> float:
        """Time of one READ of ``num_bytes``; the lists are prepared at first use."""
        each = min(SHAPES[shape], num_bytes)
        if (num_bytes, each) not in self._lists:
            self._lists[num_bytes, each] = (
                self._prepare("NIXL_INIT_AGENT", self._pool.data_ptr(), each, num_bytes),
                self._prepare("raw-owner", self._address, each, num_bytes),
                num_bytes // each,
            )
        ours, theirs, number = self._lists[num_bytes, each]
        begin_s = time.perf_counter()
        handles = []
        for index in np.arange(number, dtype=np.int32).reshape(-1, 1):
            handle = self._agent.make_prepped_xfer("READ", ours, index, theirs, index)
            if self._agent.transfer(handle) != "DONE":
                handles.append(handle)
        while handles:
            handles = [one for one in handles if self._agent.check_xfer_state(one) != "DONE"]
            if time.perf_counter() - begin_s > BOUND_S:
                raise TimeoutError(f"a raw READ of {num_bytes} bytes")
        return time.perf_counter() - begin_s

    def copy_s(self, num_bytes: int) -> float:
        """Time of copying as much within this process, by one thread or by the GPU."""
        flat = self._pool.view(-1)
        if not hasattr(self, "_copy"):
            self._copy = torch.full_like(flat, 1)
        begin_s = time.perf_counter()
        flat[:num_bytes].copy_(self._copy[:num_bytes])
        if flat.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    def _prepare(self, name: str, address: int, each: int, num_bytes: int) -> object:
        rows = np.array([[address, each, 0, each, num_bytes // each]], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(name, rows, region_of(self._pool).memory_kind)


def bytes_of(node: Node) -> memoryview:
    """The pool's memory as bytes."""
    array: Any = node.pool.view(-1).numpy()
    return memoryview(array).cast("B")


class SocketOwner:
    """Sends the pool's first bytes to every peer that requests them."""

    def __init__(self, node: Node) -> None:
        self._bytes = bytes_of(node)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, name="socket", daemon=True).start()

    def port(self) -> int:
        """Port on which the owner listens."""
        return int(self._listener.getsockname()[1])

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            while wanted := connection.recv(8):
                connection.sendall(self._bytes[: int.from_bytes(wanted, "big")])


class SocketReader:
    """Requests bytes and receives them into the pool."""

    def __init__(self, node: Node) -> None:
        self._bytes = bytes_of(node)

    def connect(self, port: int) -> None:
        """Connect to the owner."""
        self._socket = socket.create_connection(("127.0.0.1", port), BOUND_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read_s(self, num_bytes: int) -> float:
        """Seconds from the request to the last byte."""
        begin_s = time.perf_counter()
        self._socket.sendall(num_bytes.to_bytes(8, "big"))
        received = 0
        while received < num_bytes:
            now = self._socket.recv_into(self._bytes[received:num_bytes])
            if not now:
                raise ConnectionError("the owner has gone")
            received += now
        return time.perf_counter() - begin_s
