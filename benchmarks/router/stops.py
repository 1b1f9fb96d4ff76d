"""For how long all streams of a router stand still at once: ``python -m benchmarks.router.stops``.

What a router does between two turns of its event loop, at 10, 100 and 1,000 workers: a page of
metrics, in all and its longest piece, beside prometheus_client, which writes the same metrics at
once; what a worker that has 65,536 blocks in each of two groups, and 500,000 in a tier, tells a
router that comes late, in all, its longest part, and the same as one message; the loss of that
worker, in all and its longest part; a message of a followed vLLM server that evicts all the time,
the last of 86 beside the first 60, as what left long ago is to cost nothing; as large a message of
one as there may be, in all and its longest part. CPU milliseconds of
the production objects in this process, the least of some rounds, without sending. Target: the
longest piece 5 times shorter than the whole at once; of the evictions at most 3 times the first.
``--quick``: up to 100 workers, no tier.
"""

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from benchmarks.transfer.figures import MS, figure
from disagg.kv.hashing import BlockHasher, tenant_salt
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksStored, KVSnapshot, TierStored
from disagg.messages.registration import GroupInfo
from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram, WorkerStats
from disagg.router.kv_event_subscriber import MESSAGE_BYTES_MAX
from disagg.router.metrics import Metrics
from disagg.router.worker_metrics import COUNTERS, RESIDENCY
from disagg.routing.followed.block_names import BlockNames
from disagg.routing.followed.followed_caches import FollowedCaches
from disagg.routing.followed.vllm_events import VllmRemoved, VllmStored, read_message
from disagg.routing.index import PrefixIndex
from disagg.wire.kv_events_codec import kv_batch_from_wire, kv_batch_to_wire
from disagg.wire.v1 import kv_events_pb2

ROUNDS = 3
SHARE = 5.0
WORKER, OTHER = Incarnation("w", "e"), Incarnation("other", "e")
POOL_BLOCKS, TIER_BLOCKS = 65_536, 500_000
GROUPS = (GroupInfo("full_attention", 16, 0, 1, 64), GroupInfo("sliding_window", 16, 1024, 1, 64))


class Same(Collector):
    """The metrics of a page, for a registry."""

    def __init__(self, page: str) -> None:
        self._metrics = list(text_string_to_metric_families(page))

    def collect(self) -> Iterable[Metric]:
        """The metrics, for the registry that calls it."""
        return self._metrics


def took(steps: Iterator[object]) -> tuple[float, float]:
    """Milliseconds of all steps, and of the longest one."""
    each: list[float] = []
    while True:
        began_s = time.process_time()
        if next(steps, None) is None:
            return sum(each), max(each)
        each.append((time.process_time() - began_s) * MS)


def least(steps: Callable[[], Iterator[object]]) -> tuple[float, float]:
    """The same of several rounds, each figure by itself."""
    whole, longest = zip(*(took(steps()) for _ in range(ROUNDS)), strict=True)
    return min(whole), min(longest)


def report(name: str, whole: float, longest: float, at_once: float, peer_name: str) -> bool:
    """Print what something takes in all, and its longest stop."""
    figure(
        f"{name}, in all", [whole], [at_once], unit="ms of CPU", target=None,
        peer_name=peer_name, note=f"least of {ROUNDS}",
    )  # fmt: skip
    return figure(
        f"{name}, longest stop", [longest], [at_once], unit="ms of CPU", target=SHARE,
        peer_name=peer_name, note=f"least of {ROUNDS}",
    )  # fmt: skip


def page(num_workers: int) -> bool:
    """A page of metrics of so many workers."""
    metrics = Metrics("m")
    stats = WorkerStats(
        *(1,) * 9,
        ready=True,
        counters=tuple((name, number) for number, name in enumerate(COUNTERS)),
        residency=tuple(
            ResidencyHistogram(name, (7,) * (len(RESIDENCY_BOUNDS_MS) + 1), 123)
            for name in RESIDENCY
        ),
    )
    for number in range(num_workers):
        metrics.worker_stats(f"worker-{number}", "decode", stats)
    registry = CollectorRegistry()
    registry.register(Same(metrics.text()))
    whole, longest = least(metrics.pieces)
    _, at_once = least(lambda: _written(registry))
    return report(
        f"metrics of {num_workers} workers", whole, longest, at_once, "prometheus_client, at once"
    )


def _written(registry: CollectorRegistry) -> Iterator[object]:
    yield generate_latest(registry)


def snapshot(num_in_tier: int) -> bool:
    """What a worker with a full pool, and so many blocks in a tier, has."""
    pool, tier = prompts(POOL_BLOCKS), prompts(num_in_tier)
    tiers = tuple(TierStored(0, group, tier) for group in range(2)) if tier else ()
    told = KVSnapshot(1, (pool, pool), tiers)

    def take_in(messages: Iterable[bytes]) -> Iterator[object]:
        index = new_index()
        for message in messages:
            yield taken_in(index, message)

    parts = [kv_batch_to_wire("e", part).SerializeToString() for part in told.parts()]
    whole, longest = least(lambda: take_in(parts))
    _, at_once = least(lambda: take_in([kv_batch_to_wire("e", told).SerializeToString()]))

    def lose() -> Iterator[object]:
        index = new_index()
        for message in parts:
            taken_in(index, message)
        index.add(OTHER, 1)
        return taken_out(index)

    what = f"{POOL_BLOCKS:,} blocks in two groups"
    if num_in_tier:
        what += f", {num_in_tier:,} in a tier"
    for name, value in zip(("in all", "longest stop"), least(lose), strict=True):
        figure(
            f"a worker is lost that had {what}, {name}", [value], None, unit="ms of CPU",
            target=None, peer_name=None, note=f"least of {ROUNDS}",
        )  # fmt: skip
    return report(what, whole, longest, at_once, "one message")


def evictions() -> bool:
    """A server stores blocks and evicts them, more than are remembered."""
    names = BlockNames(
        BlockHasher(b"key of the workers", 16).extend, 16, partial(tenant_salt, ""), 1 << 16
    )
    each = []
    for first in range(0, 86_000, 1_000):
        hashes = tuple(range(first, first + 1_000))
        tokens = tuple(range(16 * first, 16 * (first + 1_000)))
        stored = VllmStored(0, "full_attention", 0, 16, hashes, None, tokens, "", False)
        began_s = time.process_time()
        deque(names.take_in([stored, VllmRemoved(0, hashes)]), maxlen=0)
        each.append((time.process_time() - began_s) * MS)
    return figure(
        "a message of 1,000 blocks, stored and evicted, of a followed server", each[-3:], each[:60],
        unit="ms of CPU", target=0.33, peer_name="its first 60 messages", note="medians",
    )  # fmt: skip


def followed_message() -> bool:
    """As large a message as a followed server may send, after a thread has read it."""
    num = MESSAGE_BYTES_MAX // (16 * 5 + 9)
    event = {
        "type": "BlockStored", "block_size": 16, "medium": "GPU", "group_idx": 0,
        "block_hashes": [(1 << 40) + number for number in range(num)],
        "token_ids": [70_000] * (16 * num),
    }  # fmt: skip
    told = read_message([0.0, [event], 0])

    def take_in() -> Iterator[object]:
        hasher = BlockHasher(b"key of the workers", 16)
        cache = FollowedCaches(hasher.extend, 16).follow(
            "a", partial(tenant_salt, ""), can_replay=False
        )
        cache.connected(0)
        cache.live(0, 0, told)
        yield cache
        while cache.has_due:
            cache.take_in()
            yield cache

    whole, longest = least(take_in)
    return report(f"{num:,} blocks that a followed server stores", whole, longest, whole, "at once")


def new_index() -> PrefixIndex:
    """Of one worker, of which nothing is known yet."""
    index = PrefixIndex(GROUPS, 16)
    index.add(WORKER, 1 << 30, (1 << 30,))
    return index


def taken_in(index: PrefixIndex, message: bytes) -> bool:
    """Decode what came, and let the index have it."""
    wire = kv_events_pb2.KvEventBatch.FromString(message)
    _, batch = kv_batch_from_wire(wire)
    assert isinstance(batch, KVSnapshot)
    stored = [BlocksStored(group, hashes, None, 0, 16) for group, hashes in enumerate(batch.hashes)]
    assert index.apply(WORKER, batch.next_seq, batch.part, [*stored, *batch.tiers])
    return True


def taken_out(index: PrefixIndex) -> Iterator[object]:
    """Lose the worker; each event of another one takes a part of its blocks out."""
    index.remove(WORKER)
    yield index
    while index.num_blocks:
        index.apply(OTHER, 0, None, [])
        yield index


def prompts(num_blocks: int) -> tuple[bytes, ...]:
    """Chain values."""
    return tuple(os.urandom(32) for _ in range(num_blocks))


def main() -> int:
    """Run all cases; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 100 workers, no tier")
    quick = parser.parse_args().quick
    reached = [page(num) for num in ((10, 100) if quick else (10, 100, 1_000))]
    reached += [snapshot(num) for num in ((0,) if quick else (0, TIER_BLOCKS))]
    reached += [evictions(), followed_message()]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    raise SystemExit(main())
