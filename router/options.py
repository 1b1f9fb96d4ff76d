"""Plain numbers and names the router is built from; settings are read elsewhere."""

from dataclasses import dataclass, field

from disagg.routing.policy.registry import DEFAULT_POLICY as DEFAULT_POLICY
from disagg.routing.policy.registry import POLICIES

POLICY_NAMES: tuple[str, ...] = tuple(sorted(POLICIES))
"""What `router.policy` may be set to."""


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Everything the router needs to start. Validated where the settings are read."""

    model_dir: str
    """Checkpoint directory; only config, generation defaults and tokenizer are read."""
    model_name: str
    """The name clients use."""
    host: str = "127.0.0.1"
    http_port: int = 8000
    """0: any free one (printed at start)."""
    grpc_port: int = 50051
    """0: any free one."""
    hash_key: str = field(default="", repr=False)
    """Must equal the workers'; "" derives it from the model's fingerprint."""
    body_bytes_max: int = 32 << 20
    receive_timeout_ms: int = 20_000
    """An HTTP connection that is idle or sends half a head for so long is closed; so is one whose
    request body does not go on."""
    connections_max: int = 4096
    """HTTP connections; one more is answered 503 and closed."""
    requests_max: int = 1024
    """Live requests; more are refused with 429."""
    replans_max: int = 3
    """Tries after the first before a request fails."""
    request_timeout_ms: int = 600_000
    """A request that stands still for so long fails with 504."""
    records_max: int = 1024
    """Finished requests whose record stays readable."""
    heartbeat_ms: int = 1_000
    worker_silent_ms: int = 10_000
    """A worker that sends nothing for so long is dropped."""
    roles_wanted: tuple[str, ...] = ("prefill", "decode")
    """Each must have had a ready worker before the router is ready; ``both`` counts as either."""
    policy: str = DEFAULT_POLICY
    """Name of the rule that chooses workers (`disagg.routing.policy.registry`)."""
    pull_tokens_min: int = 256
    """So many more tokens of prefix another worker must have to be pulled from. A pull costs a
    request, a READ and a commit before the first chunk; fewer tokens are computed as fast."""
    decode_prefill_tokens_max: int = 512
    """Tokens that a decode worker may compute of a prompt whose prefix its tiers have."""
    accept_unlike_workers: bool = False
    """Take in workers that exchange no KV with the others; each serves alone."""
    admin_endpoints: bool = False
    """Serve what changes the workers' state and is no request: the reset of prefix caches."""
