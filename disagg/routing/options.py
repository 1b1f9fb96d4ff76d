"""What a router's core goes by."""

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.routing.planner import OnBug
from disagg.routing.policy.protocol import PolicyOptions
from disagg.routing.policy.registry import DEFAULT_POLICY
from disagg.routing.revisions import HasherOf

WORKER_PREFILL_TOKENS_MAX = 16_384
"""Some tenths of a second of work: a worker is never idle for lack of it."""
WORKER_WAITING_MAX = 16
WORKER_STALLED_MS = 20_000
_POLICY_OPTIONS = PolicyOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """Of one life of a router."""

    hasher_of: HasherOf
    """Names the blocks of prompts as a worker does."""
    replans_max: int
    """Plans after the first, per request."""
    requests_max: int
    """Live requests, waiting ones included; more are refused."""
    request_timeout_ms: int
    """Without any progress for so long a request expires."""
    records_max: int
    """Finished requests whose record is kept."""
    worker_silent_ms: int
    """A worker that sends nothing for so long is lost."""
    worker_silent_busy_ms: int | None = None
    """So is one that has work, after this time already, or more if it is often silent for long;
    None: as ``worker_silent_ms``."""
    worker_stalled_ms: int = WORKER_STALLED_MS
    """After so long in which its stats say that its step takes too long, what a worker has goes on
    elsewhere."""
    policy: str = DEFAULT_POLICY
    """Name of the rule that chooses workers."""
    policy_options: PolicyOptions = _POLICY_OPTIONS
    """What such rules go by."""
    accept_unlike_workers: bool = False
    """Workers that exchange no KV with others of their revision may register; they serve alone."""
    revision_weights: Mapping[str, float] | None = None
    """By which new requests are shared among revisions, see `Revisions`."""
    worker_prefill_tokens_max: int = WORKER_PREFILL_TOKENS_MAX
    """While so many tokens of prompts are to be computed at a worker, it is not given more; what
    has no room anywhere waits at the router, where tenants take turns."""
    worker_waiting_max: int = WORKER_WAITING_MAX
    """Requests at a worker beyond those that it runs at once; then likewise."""
    tenant_weights: Mapping[str, float] | None = None
    """A tenant's part of the tokens where requests wait; 1 where there is none."""
    router_id: str = ""
    """Of this life of the router, a part of every key; other routers have others."""
    on_plan_bug: OnBug | None = None
    """See `Planner`."""
