"""All servers whose KV events the router follows, and their series on /metrics."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from disagg.kv.hashing import BlockHasher, block_hash_key, tenant_salt
from disagg.router.kv_event_endpoints import KVEventEndpoint, parse_endpoints
from disagg.router.options import RouterOptions
from disagg.routing.followed.followed_caches import FollowedCache, FollowedCaches

HASHER_OF = "followed caches"
"""In place of a model's fingerprint: names that are compared with no worker's."""
GAUGES = (
    ("blocks", "Blocks that a followed server has cached in some group.", "num_blocks"),
    ("complete", "1: nothing that it has published is known to be missing.", "is_complete"),
)
COUNTERS = (
    ("batches", "Messages of KV events of a followed server.", "num_batches"),
    ("losses", "Times that all it had cached was forgotten, as events were lost.", "num_losses"),
    ("unnamed_blocks", "Blocks left out: not named by tokens told of.", "num_unnamed"),
)


class FollowedServers:
    """Follows them as long as `run` runs. Nothing is planned by what they hold.

    Attributes:
        caches: what they hold.
    """

    def __init__(self, options: RouterOptions) -> None:
        self._endpoints = parse_endpoints(options.kv_event_endpoints)
        key = block_hash_key(options.hash_key, HASHER_OF)
        name_tokens = options.kv_event_block_tokens
        self.caches = FollowedCaches(BlockHasher(key, name_tokens).extend, name_tokens)
        self._parts: list[tuple[KVEventEndpoint, FollowedCache]] = [
            (
                one,
                self.caches.follow(
                    one.name,
                    partial(tenant_salt, one.tenant),
                    can_replay=bool(one.replay),
                    tenant=one.tenant,
                ),
            )
            for one in self._endpoints
        ]

    async def run(self, now_ms: Callable[[], int], failed: Callable[[str], None]) -> None:
        """Follow all of them until cancelled.

        Args:
            now_ms: the time.
            failed: told of bugs in the tasks that do it, already logged.
        """
        # ZeroMQ costs every router memory and time to start; few follow anybody.
        from disagg.router.kv_event_subscriber import KVEventSubscriber, Turns, new_context

        context, turns = new_context(), Turns()
        try:
            async with asyncio.TaskGroup() as tasks:
                for endpoint, cache in self._parts:
                    follows = KVEventSubscriber(endpoint, cache, turns, now_ms, failed).run(context)
                    tasks.create_task(follows, name=f"KV events of {endpoint.name}")
        finally:
            context.destroy(linger=0)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All metrics, for the registry that calls it."""
        views = self.caches.views()
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(f"disagg_followed_{name}", text, labels=["server"])
            for view in views:
                counter.add_metric([view.name], getattr(view, field))
            yield counter
        for name, text, field in GAUGES:
            gauge = GaugeMetricFamily(f"disagg_followed_{name}", text, labels=["server"])
            for view in views:
                gauge.add_metric([view.name], getattr(view, field))
            yield gauge
