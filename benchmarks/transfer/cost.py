"""CPU time of the bookkeeping per pulled block, and whether it grows with the pool.

First the tables and the wire codec alone, in one thread, over pools of different sizes; then two
whole nodes with blocks so small that copying them does not count.
"""

import gc
import time
from random import Random
from types import TracebackType

from benchmarks.transfer.figures import figure
from benchmarks.transfer.pair import Pair
from benchmarks.transfer.plan import NodePlan
from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Commit, CommitAnswer, CommitSeen, Offers, PeerMessage
from disagg.testing.table_news import TableNews
from disagg.transfer.actions import PostRead, Send
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.table import InboundTable
from disagg.wire.peer_codec import peer_from_wire, peer_to_wire
from disagg.wire.stream_hello import PeerHello
from disagg.wire.v1 import peer_pb2

NUM_BLOCKS = 2048
"""Pulled at a time: a prompt of 32k tokens in one group."""
BLOCKS_PER_READ = 64
SMALL = FullAttentionSpec(block_tokens=16, num_kv_heads=1, head_size=4, dtype_bytes=2)
SEED = 4
US = 1e6
TTL_MS = 10_000


class Side:
    """One worker's pool and name, and the CPU time spent on its account (as a context)."""

    def __init__(self, name: str, pool_blocks: int, scattered: bool) -> None:
        self.me = Incarnation(name, f"epoch-{name}")
        self.pool = BlockPool(pool_blocks, 1)
        self.used_s = 0.0
        self._free = self.pool.allocate(self.pool.num_free)
        if scattered:
            Random(SEED).shuffle(self._free)
        self.blocks = list(enumerate(self._free[:NUM_BLOCKS]))

    def __enter__(self) -> None:
        self._begin_s = time.thread_time()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.used_s += time.thread_time() - self._begin_s


class Bench:
    """One owner and one reader in one thread; every message goes through the wire's codec."""

    def __init__(self, pool_blocks: int, scattered: bool) -> None:
        self.owner = Side("owner", pool_blocks, scattered)
        self.reader = Side("reader", pool_blocks, scattered)
        self.said = TableNews()
        self.leases = LeaseTable(
            self.owner.me, self.owner.pool, self.said, ttl_ms=TTL_MS, committed_max=16
        )
        self.inbound = InboundTable(
            self.reader.me,
            self.reader.pool,
            self.said,
            commit_repeat_ms=TTL_MS,
            ask_repeat_ms=TTL_MS,
            read_stuck_ms=TTL_MS,
            blocks_per_read_max=BLOCKS_PER_READ,
        )

    def pull(self, number: int) -> tuple[float, float]:
        """One pull of `NUM_BLOCKS`; CPU us per block of owner and reader."""
        key, owner, reader = RequestKey(str(number), 1), self.owner, self.reader
        owner.used_s = reader.used_s = 0.0
        with reader:
            self.inbound.begin(0, key, owner.me, [reader.blocks], self.said)
        with owner:
            lease = self.leases.open(0, key, reader.me, self.said)
            self.leases.seal(0, lease, [owner.blocks], NUM_BLOCKS * 16)
            data = _pack(owner, reader, self._sent())
        with reader:
            message = _unpack(data)
            assert isinstance(message, Offers)
            self.inbound.on_offers(0, owner.me, message)
            reads = [said.read_id for said in self.said.take() if isinstance(said, PostRead)]
            for read_id in reads:
                self.inbound.on_read_done(0, read_id)
            data = _pack(reader, owner, self._sent())
        with owner:
            message = _unpack(data)
            assert isinstance(message, Commit)
            self.leases.on_commit(reader.me, message)
            data = _pack(owner, reader, self._sent())
        with reader:
            message = _unpack(data)
            assert isinstance(message, CommitAnswer)
            assert message.ok
            self.inbound.on_commit_answer(0, owner.me, message)
            data = _pack(reader, owner, self._sent())
            self.inbound.finish(key)
        with owner:
            message = _unpack(data)
            assert isinstance(message, CommitSeen)
            self.leases.on_seen(reader.me, message)
        assert (self.leases.num_live, self.inbound.num_live) == (0, 0)
        return owner.used_s * US / NUM_BLOCKS, reader.used_s * US / NUM_BLOCKS

    def _sent(self) -> PeerMessage:
        (message,) = (said.message for said in self.said.take() if isinstance(said, Send))
        return message


def _pack(sender: Side, to: Side, message: PeerMessage) -> bytes:
    return peer_to_wire(sender.me, to.me.epoch, message).SerializeToString()


def _unpack(data: bytes) -> PeerMessage | PeerHello:
    return peer_from_wire(peer_pb2.PeerEnvelope.FromString(data))[2]


def measure_tables(pool_sizes: list[int], num_samples: int) -> bool:
    """Print the cost of tables and codec per block; ratios are to the smallest pool."""
    reached = True
    for scattered in (False, True):
        benches = {size: Bench(size, scattered) for size in pool_sizes}
        found: dict[int, list[tuple[float, float]]] = {size: [] for size in pool_sizes}
        gc.collect()
        gc.freeze()
        for number in range(num_samples + 1):
            for size, bench in benches.items():
                sample = bench.pull(number)
                if number:
                    found[size].append(sample)
        gc.unfreeze()
        for index, side in enumerate(("owner", "reader")):
            smallest = [sample[index] for sample in found[pool_sizes[0]]]
            for size in pool_sizes:
                first = size == pool_sizes[0]
                reached &= figure(
                    f"tables and codec of the {side}, pool of {size} blocks, "
                    + ("scattered" if scattered else "adjacent"),
                    [sample[index] for sample in found[size]],
                    None if first else smallest,
                    unit="us CPU per pulled block",
                    target=None if first else 0.67,
                    peer_name=None if first else f"a pool of {pool_sizes[0]} blocks",
                    note=f"pulls of {NUM_BLOCKS} blocks, {BLOCKS_PER_READ} per READ",
                )
    return reached


def measure_nodes(pool_sizes: list[int], num_samples: int) -> None:
    """Print the CPU time of the whole control and transport threads per block."""
    found: dict[int, list[dict[str, float]]] = {}
    for size in pool_sizes:
        plan = NodePlan("", (SMALL,), size, handle_bytes_max=BLOCKS_PER_READ * SMALL.page_bytes)
        with Pair(plan) as pair:
            found[size] = [_pull_costs(pair) for _ in range(num_samples + 1)][1:]
    for name in found[pool_sizes[0]][0]:
        smallest = [sample[name] for sample in found[pool_sizes[0]]]
        for size in pool_sizes:
            first = size == pool_sizes[0]
            figure(
                f"thread {name}, pool of {size} blocks",
                [sample[name] for sample in found[size]],
                None if first else smallest,
                unit="us CPU per pulled block",
                target=None,
                peer_name=None if first else f"a pool of {pool_sizes[0]} blocks",
                note=f"whole hand-over of {NUM_BLOCKS} blocks of {SMALL.page_bytes} bytes, "
                f"{BLOCKS_PER_READ} per READ",
            )


def _pull_costs(pair: Pair) -> dict[str, float]:
    sides = {"owner": pair.owner, "reader": pair.reader}
    threads = (("control", "owner"), ("control", "reader"), ("nixl", "reader"))
    before = {side: remote.call("cpu_s") for side, remote in sides.items()}
    num_pulls = 5
    for _ in range(num_pulls):
        pair.pull(NUM_BLOCKS * 16, check=False)
    after = {side: remote.call("cpu_s") for side, remote in sides.items()}
    return {
        f"{thread} of the {side}": (after[side][thread] - before[side][thread])
        * (US / NUM_BLOCKS / num_pulls)
        for thread, side in threads
    }
