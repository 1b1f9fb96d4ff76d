"""The JSON of ``/v1/disagg/status``: what the live page and `disagg status` show."""

from typing import Literal

from disagg.router.openapi.admin_answers import Incarnation, Revision
from disagg.router.openapi.answers import Answered


class Router(Answered):
    """The router that answers."""

    router_id: str
    version: str
    model: str
    status: Literal["ok", "stopping"]
    ready: bool
    missing: list[str]
    num_requests: int
    num_waiting: int


class Group(Answered):
    """Blocks of one KV cache group; null where the worker did not say."""

    group: int
    kind: str
    window_tokens: int
    block_tokens: int
    num_layers: int
    num_held: int | None
    num_cached: int | None


class Pool(Answered):
    """A worker's blocks."""

    num_blocks_usable: int | None
    num_blocks_free: int | None
    num_blocks_quarantined: int | None
    groups: list[Group]


class Tier(Answered):
    """Where blocks go that the pool gives up."""

    name: str
    num_blocks: int


class Lease(Answered):
    """Blocks that another worker reads from here."""

    lease_id: int
    request_id: str | None
    reader: Incarnation
    state: str
    num_blocks: int


class Inbound(Answered):
    """Blocks that are read from another worker."""

    request_id: str | None
    owner: Incarnation
    state: str
    num_blocks: int
    num_reads: int


class FleetWorker(Answered):
    """A worker, as it registered, as it last reported, and as it answers now."""

    worker_id: str
    epoch: str
    role: str
    revision: str
    address: str
    version: str | None
    wire: list[int]
    state: Literal["ready", "stalled", "draining", "starting", "away"]
    heard_ms_ago: int
    num_requests: int
    max_model_tokens: int
    num_waiting: int | None
    num_running: int | None
    num_prefill_tokens_queued: int | None
    num_reservations: int | None
    pool: Pool
    tiers: list[Tier]
    leases: list[Lease]
    inbound: list[Inbound]
    answered: bool
    error: str


class NewRequest(Answered):
    """A request in few words."""

    request_id: str
    tenant: str
    revision: str
    state: str
    received_ms: int
    first_token_ms: int | None
    finished_ms: int | None
    num_prompt_tokens: int
    num_tokens: int
    num_generations: int
    prefill: str | None
    decode: str | None


class Overview(Answered):
    """The fleet and the newest requests, at one moment."""

    now_ms: int
    router: Router
    revisions: list[Revision]
    workers: list[FleetWorker]
    requests: list[NewRequest]
