"""One process with a pool and a NIXL transport, driven by JSON lines; run as a script by tests."""

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from nixl import _api as nixl  # type: ignore[import-untyped]

from disagg.wire.stream_hello import PoolInfo
from disagg.workers.engines.native.paged_pool import region_of
from disagg.workers.nixl_transport import NixlTransport


def block_bytes_of(seed: int, block: int, num_bytes: int) -> bytes:
    """What a node made with ``seed`` holds in a block at the start."""
    return np.random.default_rng([seed, block]).bytes(num_bytes)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Node:
    def __init__(
        self,
        name: str,
        seed: int,
        num_blocks: int,
        block_bytes: int,
        handle_bytes_max: int,
        telemetry: bool = False,
        num_parts: int = 1,
    ) -> None:
        """``telemetry`` counts what NIXL was asked for, see `counts`.

        With several parts the first ones of all blocks come first, then the second ones, ...
        """
        self.counted: dict[str, list[int]] = {"prepared": [], "descriptors": [], "bytes": []}
        if telemetry:
            self._count()
        data = b"".join(block_bytes_of(seed, i, block_bytes) for i in range(num_blocks))
        blocks = torch.frombuffer(bytearray(data), dtype=torch.int8).view(num_blocks, num_parts, -1)
        memory = blocks.transpose(0, 1).contiguous()
        self.pool = memory.transpose(0, 1)
        region = replace(region_of(memory.view(num_blocks, -1)), num_parts=num_parts)
        self.ends: dict[int, list[str]] = {}
        self.changed = threading.Condition()
        self.transport = NixlTransport(
            name,
            region,
            on_read_done=self.on_read_done,
            handle_bytes_max=handle_bytes_max,
        )

    def _count(self) -> None:
        """Have NIXL's agents keep telemetry, and note it before a handle is released."""
        made, prepare = nixl.nixl_agent_config, nixl.nixl_agent.prep_xfer_dlist
        release, counted = nixl.nixl_agent.release_xfer_handle, self.counted

        def config(**arguments: Any) -> Any:
            return made(capture_telemetry=True, **arguments)

        def prep_xfer_dlist(agent: Any, name: str, *arguments: Any) -> Any:
            counted["prepared"].append(len(arguments[0]))
            return prepare(agent, name, *arguments)

        def release_xfer_handle(agent: Any, handle: Any) -> None:
            seen = agent.get_xfer_telemetry(handle)
            counted["descriptors"].append(seen.descCount)
            counted["bytes"].append(seen.totalBytes)
            release(agent, handle)

        nixl.nixl_agent_config = config
        nixl.nixl_agent.prep_xfer_dlist = prep_xfer_dlist
        nixl.nixl_agent.release_xfer_handle = release_xfer_handle

    def counts(self) -> dict[str, list[int]]:
        """Pools prepared so far; descriptors and bytes of each handle since the last call."""
        counts = {name: list(values) for name, values in self.counted.items()}
        self.counted["descriptors"].clear()
        self.counted["bytes"].clear()
        return counts

    def cpu_ms(self) -> float:
        """CPU time of this process so far."""
        return time.process_time() * 1000

    def on_read_done(self, read_id: int, error: str) -> None:
        with self.changed:
            self.ends.setdefault(read_id, []).append(error)
            self.changed.notify_all()
        if read_id == 1:
            raise RuntimeError("a caller's mistake must not end the transport")

    def info(self) -> dict[str, Any]:
        (pool,) = self.transport.local_pools()
        return {**asdict(pool), "transport_metadata": pool.transport_metadata.hex()}

    def add(self, name: str, info: dict[str, Any]) -> None:
        metadata = bytes.fromhex(info["transport_metadata"])
        self.transport.add_peer(name, [PoolInfo(**{**info, "transport_metadata": metadata})])

    def remove(self, name: str) -> None:
        self.transport.remove_peer(name)

    def read(self, read_id: int, peer: str, src: list[int], dst: list[int]) -> None:
        self.transport.read(read_id, peer, src, dst)

    def wait(self, read_id: int, timeout_s: float) -> list[str]:
        """Every report of a read's end: exactly one, or none when time is up."""
        with self.changed:
            self.changed.wait_for(lambda: read_id in self.ends, timeout_s)
            return self.ends.get(read_id, [])

    def cut(self) -> int:
        """Break every TCP connection to others, as a network would; their number."""
        ends: dict[int, tuple[Any, Any]] = {}
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.family == socket.AF_INET:
                        ends[fd] = connection.getsockname(), connection.getpeername()
            except OSError:  # not a connection
                continue
        own = {name for name, _ in ends.values()}
        num_cut = 0
        for fd, (_, peer) in ends.items():
            # UCX may close the other end's sockets of its own accord once the first is broken.
            with contextlib.suppress(OSError):
                if peer not in own:
                    with socket.socket(fileno=os.dup(fd)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        return num_cut

    def digests(self) -> list[str]:
        return [digest(block.contiguous().numpy().tobytes()) for block in self.pool]

    def state(self) -> dict[str, Any]:
        t = self.transport
        return {
            "failure": t.failure,
            "reads": t.num_reads,
            "handles": t.num_in_progress,
            "oldest_ms": t.oldest_in_progress_ms,
            "bytes": t.num_bytes_in_progress,
        }

    def close(self, timeout_s: float) -> bool:
        return self.transport.close(timeout_s)


def main() -> None:
    """Answer every line with ``{"value": ...}`` or ``{"error": ...}`` until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL logs to standard output, in the middle of a line
    node = Node(**json.loads(sys.argv[1]))
    print(json.dumps({"value": node.info()}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            value = getattr(node, request["call"])(**request["with"])
            answer = {"value": value}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
