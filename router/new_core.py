"""The core as a router's options want it."""

from disagg.router.fleet_hasher import FleetHasher
from disagg.router.options import RouterOptions
from disagg.routing.core import RouterCore
from disagg.routing.fair_queue import parse_weights
from disagg.routing.options import RoutingOptions
from disagg.routing.planner import OnBug
from disagg.routing.policy.protocol import PolicyOptions
from disagg.routing.revisions import parse_revision_weights


def new_core(options: RouterOptions, router_id: str, on_plan_bug: OnBug) -> RouterCore:
    """Build the core of a router's life, which begins without workers.

    Args:
        options: of the router.
        router_id: of this life.
        on_plan_bug: told of a request whose planning failed by a bug, and how.

    Raises:
        ConfigError: an option is wrong, by name.
    """
    return RouterCore(
        RoutingOptions(
            hasher_of=FleetHasher(options.hash_key).hasher_of,
            replans_max=options.replans_max,
            requests_max=options.requests_max,
            request_timeout_ms=options.request_timeout_ms,
            records_max=options.records_max,
            worker_silent_ms=options.worker_silent_ms,
            worker_silent_busy_ms=options.worker_silent_busy_ms,
            worker_stalled_ms=options.worker_stalled_ms,
            policy=options.policy,
            policy_options=PolicyOptions(
                pull_tokens_min=options.pull_tokens_min,
                decode_prefill_tokens_max=options.decode_prefill_tokens_max,
                uncached_tokens_max=options.uncached_tokens_max,
                uncached_share_max=options.uncached_share_max,
                prefill_busy_tokens=options.prefill_busy_tokens,
                decode_busy_share=options.decode_busy_share,
                affinity_weight=options.affinity_weight,
                others_weight=options.others_weight,
                slo_tpot_ms=options.slo_tpot_ms,
            ),
            accept_unlike_workers=options.accept_unlike_workers,
            revision_weights=parse_revision_weights(options.revision_weights),
            worker_prefill_tokens_max=options.worker_prefill_tokens_max,
            worker_waiting_max=options.worker_waiting_max,
            tenant_weights=parse_weights(options.tenant_weights),
            router_id=router_id,
            on_plan_bug=on_plan_bug,
        )
    )
