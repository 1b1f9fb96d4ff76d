"""How much is read from a peer at a time follows how fast that moves."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from disagg.wire.stream_hello import PoolInfo
from disagg.workers import nixl_reads
from disagg.workers.nixl_agent import NixlAgent, ReadHandle
from disagg.workers.nixl_reads import NixlReads
from disagg.workers.peer_reads import HANDLE_S, PEER_BYTES_MAX, Read

MIB = 1 << 20
HANDLE_BYTES = 16 * MIB


class SharedLink:
    """An agent whose handles all move at once, at the same pace, as UCX has them do."""

    def __init__(self, bytes_per_s: float, handle_bytes: int = HANDLE_BYTES) -> None:
        self.info = PoolInfo(b"", 0, 1 << 20, handle_bytes, "DRAM", 0)
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self.num_most = 0
        self.took_s: list[float] = []
        self._left: dict[ReadHandle, float] = {}
        self._posted_s: dict[ReadHandle, float] = {}

    def add_peer(self, name: str, info: PoolInfo) -> object:
        return object()

    def make_read(self, pool: object, src: Any, dst: Any) -> ReadHandle:
        handle = ReadHandle(object())
        self._left[handle] = len(src) * self.info.block_bytes
        return handle

    def post(self, handle: ReadHandle) -> bool:
        self._posted_s[handle] = self.now_s
        self.num_most = max(self.num_most, len(self._posted_s))
        return False

    def is_done(self, handle: ReadHandle) -> bool:
        if self._left[handle] > 0:
            return False
        self.took_s.append(self.now_s - self._posted_s.pop(handle))
        return True

    def release(self, handle: ReadHandle) -> None:
        del self._left[handle]

    def go_on(self, time_s: float) -> None:
        self.now_s += time_s
        for handle in self._posted_s:
            self._left[handle] -= self.bytes_per_s * time_s / len(self._posted_s)


def move(link: SharedLink, monkeypatch: pytest.MonkeyPatch, num_handles: int) -> None:
    """Read over the link, a block in each handle."""
    monkeypatch.setattr(nixl_reads, "time", SimpleNamespace(monotonic=lambda: link.now_s))
    ended: list[Read] = []
    reads = NixlReads(cast("NixlAgent", link), "reader", ended.append)
    reads.add_peer("owner", link.info)
    blocks = np.arange(num_handles, dtype=np.int32)
    reads.start(Read(1, "owner", blocks, blocks, piece_blocks=1))
    for _ in range(100_000):
        while reads.wait_s() == 0.0:
            reads.advance()
        link.go_on(0.01)
        reads.advance()
        if ended:
            break
    assert [read.error for read in ended] == [""]


def test_on_a_slow_link_no_handle_waits_for_the_ones_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = SharedLink(bytes_per_s=2 * MIB)  # 17 Mbit/s
    move(link, monkeypatch, 8)
    alone_s = HANDLE_BYTES / link.bytes_per_s
    assert max(link.took_s) < 1.1 * alone_s


def test_a_fast_link_has_as_much_in_progress_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SharedLink(bytes_per_s=1024 * MIB)
    move(link, monkeypatch, 64)
    assert link.num_most == PEER_BYTES_MAX // HANDLE_BYTES


def test_a_link_that_is_fast_again_is_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SharedLink(bytes_per_s=8 * MIB)
    go_on = link.go_on

    def healed(time_s: float) -> None:
        if link.now_s > 10 * HANDLE_S and link.bytes_per_s < 1024 * MIB:
            assert link.num_most == 1
            link.bytes_per_s = 1024 * MIB
        go_on(time_s)

    monkeypatch.setattr(link, "go_on", healed)
    move(link, monkeypatch, 64)
    assert link.num_most == PEER_BYTES_MAX // HANDLE_BYTES


def test_small_handles_do_not_wait_for_each_other_on_a_slow_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = SharedLink(bytes_per_s=MIB / 8, handle_bytes=MIB // 8)
    move(link, monkeypatch, 64)
    assert link.num_most > 1
