"""One read over all ranks of a worker: real NIXL agents in a process per rank."""

import multiprocessing
import queue
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from disagg.errors import ConfigError, RemoteFault
from disagg.workers.engines.native.paged_pool import region_of
from disagg.workers.rank_agent import RankAgent
from disagg.workers.rank_connections import RANK_BYTES, TOKEN_BYTES, RankAddress, accept_ranks
from disagg.workers.ranked_transport import RankedTransport

NUM_RANKS = 2
NUM_BLOCKS, BLOCK_BYTES = 16, 4096
BOUND_S = 60.0
SPAWN = multiprocessing.get_context("spawn")


def block_of(worker: str, rank: int, block: int) -> bytes:
    """What a rank's block holds at the start."""
    return np.random.default_rng([len(worker), ord(worker[0]), rank, block]).bytes(BLOCK_BYTES)


def rank_main(
    worker: str, rank: int, address: RankAddress, questions: "Connection[Any, Any]"
) -> None:
    data = b"".join(block_of(worker, rank, block) for block in range(NUM_BLOCKS))
    pool = torch.frombuffer(bytearray(data), dtype=torch.int8).view(NUM_BLOCKS, -1)
    RankAgent(f"{worker}:1", rank, region_of(pool), BLOCK_BYTES, address)
    while True:
        try:
            questions.send(bytes(pool[questions.recv()].numpy().tobytes()))
        except EOFError:
            return


class RankedWorker:
    """A worker whose ranks are processes; this process is the worker's own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: queue.Queue[tuple[int, str]] = queue.Queue()
        self.processes: list[Any] = []
        self.questions: list[Connection[Any, Any]] = []
        connections = accept_ranks(NUM_RANKS, "127.0.0.1", self._start)
        self.transport = RankedTransport(
            connections, on_read_done=lambda read_id, error: self.ends.put((read_id, error))
        )

    def _start(self, address: RankAddress) -> None:
        for rank in reversed(range(NUM_RANKS)):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(
                target=rank_main, args=(self.name, rank, address, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.insert(0, process)
            self.questions.insert(0, ours)

    def block(self, rank: int, block: int) -> bytes:
        """What a rank's block holds now."""
        self.questions[rank].send(block)
        data: bytes = self.questions[rank].recv()
        return data

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(BOUND_S)


@pytest.fixture(scope="module")
def owner() -> Iterator[RankedWorker]:
    """From whom readers only read; its ranks take seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        worker = RankedWorker("owner")
        yield worker
        worker.end()


@pytest.fixture
def workers(owner: RankedWorker) -> Iterator[tuple[RankedWorker, RankedWorker]]:
    """A reader of the test's own, which it may break, and the owner."""
    reader = RankedWorker("reader")
    yield reader, owner
    reader.end()


def test_a_read_is_one_over_all_ranks(workers: tuple[RankedWorker, RankedWorker]) -> None:
    reader, owner = workers
    reader.transport.add_peer("owner:1", owner.transport.local_pools())
    reader.transport.read(7, "owner:1", [3, 4], [9, 8])
    assert reader.ends.get(timeout=BOUND_S) == (7, "")
    for rank in range(NUM_RANKS):
        assert reader.block(rank, 9) == block_of("owner", rank, 3)
        assert reader.block(rank, 8) == block_of("owner", rank, 4)
        assert reader.block(rank, 7) == block_of("reader", rank, 7)  # untouched
    assert block_of("owner", 0, 3) != block_of("owner", 1, 3)  # control
    assert reader.transport.num_reads == 0
    assert reader.ends.empty()
    assert reader.transport.close(10)
    assert reader.transport.failure != ""


def test_one_rank_that_cannot_read_fails_the_read(
    workers: tuple[RankedWorker, RankedWorker],
) -> None:
    reader, owner = workers
    first, second = owner.transport.local_pools()
    reader.transport.add_peer("owner:1", (first, first))  # the second rank finds somebody else
    reader.transport.read(1, "owner:1", [3], [9])
    read_id, error = reader.ends.get(timeout=BOUND_S)
    assert (read_id, error != "") == (1, True)
    assert reader.block(0, 9) == block_of("owner", 0, 3)  # so one rank's end is not the end
    assert reader.block(1, 9) == block_of("reader", 1, 9)
    with pytest.raises(ValueError, match="has 1 ranks"):
        reader.transport.add_peer("narrow:1", (second,))


def test_a_rank_that_ends_ends_the_transport(workers: tuple[RankedWorker, RankedWorker]) -> None:
    reader, owner = workers
    reader.transport.add_peer("owner:1", owner.transport.local_pools())
    assert reader.transport.failure == ""
    reader.processes[1].kill()
    reader.processes[1].join(BOUND_S)
    while not reader.transport.failure:
        reader.transport.check()
    assert "rank 1" in reader.transport.failure
    with pytest.raises(RemoteFault, match="has ended"):
        reader.transport.read(1, "owner:1", [3], [9])
    assert not reader.transport.close(1)


def test_ranks_that_cannot_be_started_are_said() -> None:
    def start(address: RankAddress) -> None:
        raise RuntimeError("no rank")

    with pytest.raises(RuntimeError, match="no rank"):
        accept_ranks(2, "127.0.0.1", start)


def test_only_who_knows_the_token_is_a_rank() -> None:
    def start(address: RankAddress) -> None:
        for token in (b"", bytes(TOKEN_BYTES), address.token):
            others.append(socket.create_connection((address.host, address.port)))
            others[-1].sendall(token + (0).to_bytes(RANK_BYTES))
            others[-1].shutdown(socket.SHUT_WR)

    others: list[socket.socket] = []
    (connection,) = accept_ranks(1, "127.0.0.1", start)
    connection.send("for the rank")
    heard = [each.recv(100) for each in others]
    assert [b"for the rank" in each for each in heard] == [False, False, True]
    for each in others:
        each.close()


def test_a_rank_that_does_not_start_is_said() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("failed", "no device"))
    with pytest.raises(ConfigError, match="rank 0 does not start: no device"):
        RankedTransport([ours], on_read_done=lambda *_: None)
