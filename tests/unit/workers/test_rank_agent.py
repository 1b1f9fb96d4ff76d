"""A rank's transport that fails is noticed in the worker's process, whatever fails."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from disagg.errors import RemoteFault
from disagg.wire.stream_hello import PoolInfo
from disagg.workers import rank_agent
from disagg.workers.pool_region import PoolRegion
from disagg.workers.rank_agent import RankAgent
from disagg.workers.rank_connections import accept_ranks
from disagg.workers.ranked_transport import RankedTransport

POOL = PoolInfo(b"", 0, 2, 4096, "DRAM", 0)


class FakeTransport:
    """Ends with its first peer."""

    def __init__(
        self,
        name: str,
        pool: object,
        *,
        on_read_done: Callable[[int, str], None],
        handle_bytes_max: int,
        rank: int,
    ) -> None:
        self.failure = ""
        self.num_in_progress = self.oldest_in_progress_ms = 0

    def local_pools(self) -> tuple[PoolInfo, ...]:
        return (POOL,)

    def add_peer(self, name: str, pools: object) -> None:
        if name == "bug:1/0":
            raise KeyError(name)
        self.failure = "no device"
        raise RemoteFault(f"the KV transport has ended: {self.failure}")

    def remove_peer(self, name: str) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> RankedTransport:
    monkeypatch.setattr(rank_agent, "NixlTransport", FakeTransport)
    region = PoolRegion(0, 2, 4096, "DRAM", 0, None)
    connections: list[Connection[Any, Any]] = accept_ranks(
        1, "127.0.0.1", lambda address: RankAgent("w:1", 0, region, 4096, address)
    )
    return RankedTransport(connections, on_read_done=lambda read_id, error: None)


@pytest.mark.parametrize(("peer", "said"), [("late:1", "no device"), ("bug:1", "rank 0 has ended")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.timeout(120)
def test_a_command_that_fails_is_heard_of(transport: RankedTransport, peer: str, said: str) -> None:
    assert transport.failure == ""
    transport.add_peer(peer, [POOL])
    while not transport.failure:
        time.sleep(0.01)
    assert transport.failure == said
