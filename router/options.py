"""Plain numbers and names the router is built from; settings are read elsewhere."""

import re
from dataclasses import dataclass, field
from typing import Literal

from disagg.errors import ConfigError
from disagg.router.message_parts.formats import AUTO
from disagg.routing.policy.registry import DEFAULT_POLICY as DEFAULT_POLICY
from disagg.routing.policy.registry import POLICIES
from disagg.tls.addresses import is_loopback

POLICY_NAMES: tuple[str, ...] = tuple(sorted(POLICIES))
"""What `router.policy` may be set to."""
FILES_BESIDE = 1024
"""Open ones that a router needs besides its clients' connections, most of them workers'."""

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Everything the router needs to start. Validated where the settings are read."""

    model_dir: str
    """Checkpoint directory; only config, generation defaults and tokenizer are read."""
    model_name: str
    """The name clients use."""
    chat_template: str = ""
    """A file with another chat template than the checkpoint's."""
    tool_call_parser: str = AUTO
    """The format of calls of tools in answers (`disagg.router.message_parts.formats`)."""
    reasoning_parser: str = AUTO
    name: str = ""
    """Of this replica; "" takes the host's name."""
    host: str = "127.0.0.1"
    http_port: int = 8000
    """0: any free one (printed at start)."""
    grpc_port: int = 50051
    """0: any free one."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the HTTP port from a browser."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    """Metrics, workers, records, the reset of prefix caches; 0: any free one."""
    api_keys_file: str = ""
    """Who may call, see `disagg.router.keys`; without keys whoever reaches the ports."""
    api_keys: str = field(default="", repr=False)
    """What such a file holds, where there is none."""
    allow_unauthenticated: bool = False
    """Without keys listen on other addresses than loopback ones, too."""
    hash_key: str = field(default="", repr=False)
    """The cluster's secret that keys the block hashes; no worker is taken in without."""
    connections_max: int = 4096
    """HTTP connections; one more is answered 503 and closed."""
    header_bytes_max: int = 16 << 10
    """Request line and headers."""
    headers_max: int = 100
    body_bytes_max: int = 32 << 20
    receive_timeout_ms: int = 20_000
    """An HTTP connection that is idle or sends half a head for so long is closed; so is one whose
    request body does not go on."""
    receive_bytes_per_s_min: int = 4096
    """Of a body, on average after ``receive_timeout_ms``."""
    send_timeout_ms: int = 30_000
    """A client that takes nothing of what it was sent for so long is cut off."""
    send_bytes_per_s_min: int = 1024
    """Of what waits to be sent, on average after ``send_timeout_ms``."""
    send_buffer_bytes: int = 128 << 10
    """Of a connection's answers, in this machine's memory."""
    unread_tokens_max: int = 2048
    """Tokens that wait for a client; one more, and its generation is cancelled."""
    prompt_bytes_max: int = 8 << 20
    prompt_tokens_max: int = 0
    """0: as many as some worker can serve."""
    generation_tokens_max: int = 1 << 20
    """Sum of ``max_tokens`` over a request's choices."""
    requests_max: int = 1024
    """Live requests, those that wait for room at a worker included."""
    streams_per_key_max: int = 1024
    """Requests in progress of one caller's key."""
    worker_prefill_tokens_max: int = 16_384
    """So many tokens to prefill close a worker to more requests; those wait at the router."""
    worker_waiting_max: int = 16
    """Requests at a worker beyond those that it runs at once."""
    tenant_weights: tuple[str, ...] = ()
    """``NAME=WEIGHT`` each."""
    choices_max: int = 256
    """Choices of one HTTP request: its prompts times those of each."""
    observers_max: int = 16
    """Who may follow the live page's events at a time."""
    prompt_logprobs_max: int = 262_144
    """Of its prompt's log-probabilities a request may ask for so many."""
    replans_max: int = 3
    """Tries after the first before a request fails."""
    request_timeout_ms: int = 600_000
    """A request that stands still for so long fails with 504."""
    comment_ms: int = 0
    """A stream that waits for its first token is sent a comment this often; 0: none."""
    records_max: int = 1024
    """Finished requests whose record stays readable."""
    worker_silent_ms: int = 10_000
    """A worker that sends nothing for so long is dropped."""
    worker_silent_busy_ms: int = 1_500
    """So is one that has work, then or after four times its longest silence of the last minutes."""
    worker_stalled_ms: int = 20_000
    """What a worker has whose step takes far too long goes on elsewhere after so long, once."""
    drain_timeout_ms: int = 30_000
    """Asked to end, the router lets the requests that run end for so long."""
    roles_wanted: tuple[str, ...] = ("prefill", "decode")
    """Each must have had a ready worker before the router is ready; ``both`` counts as either."""
    policy: str = DEFAULT_POLICY
    """Name of the rule that chooses workers (`disagg.routing.policy.registry`)."""
    pull_tokens_min: int = 256
    """So many more tokens of prefix another worker must have to be pulled from. A pull costs a
    request, a READ and a commit before the first chunk; fewer tokens are computed as fast."""
    decode_prefill_tokens_max: int = 512
    """Tokens that a decode worker may compute of a prompt whose prefix its tiers have."""
    uncached_tokens_max: int = 512
    """Tokens that ``uncached_threshold`` lets a decode worker compute of a prompt."""
    uncached_share_max: float = 1.0
    """The same as a share of the prompt."""
    prefill_busy_tokens: int = 4096
    """Tokens that wait at every prefill worker, above which ``prefill_load`` uses the others."""
    decode_busy_share: float = 0.9
    """Of a decode worker's blocks in use, above which it does not."""
    affinity_weight: float = 1.0
    """Of an uncached token beside one that waits, for ``cache_affinity``."""
    others_weight: float = 1.0
    """Of a millisecond of others beside one of the request's own, for ``estimated``."""
    slo_ttft_ms: int = 0
    """Every request's first token should come so soon; 0: any time."""
    slo_tpot_ms: float = 0.0
    """Time per token after it; 0: any."""
    slo_shed: bool = False
    """Refuse a request for which no plan keeps its bound on the first token."""
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = False
    """A line in the log per request that has ended."""
    traces: str = "auto"
    """Where spans go: ``none``, ``console``, ``otlp``; auto: as the variables OTEL_* say."""
    traces_endpoint: str = ""
    """Of an OTLP collector; "": that of the variables."""
    accept_unlike_workers: bool = False
    """Take in workers that exchange no KV with the others of their revision; each serves alone."""
    revision_weights: tuple[str, ...] = ()
    """``NAME=WEIGHT`` each: how new requests are shared among revisions; none: equally."""
    kv_event_endpoints: tuple[str, ...] = ()
    """Servers whose KV events are followed, see `disagg.router.kv_event_endpoints`."""
    kv_event_block_tokens: int = 16
    """Tokens by which their blocks are named; divides the size of all of them."""
    tls_directory: str = ""
    """Certificate of this node, see ``disagg/tls``; "": gRPC is plain."""
    allow_insecure: bool = False
    """Serve gRPC to other machines without certificates."""


def why_exposed(
    host: str, admin_host: str, *, has_keys: bool, allow_unauthenticated: bool
) -> tuple[str, str]:
    """Whether a router would answer anybody in a network without having been told so.

    Returns:
        The setting at fault and what is wrong with it; two "" where nothing is.
    """
    if has_keys or allow_unauthenticated:
        return "", ""
    for name, given in (("host", host), ("admin_host", admin_host)):
        if not is_loopback(given):
            return name, (
                f"{given} is no loopback address and there are no API keys: give "
                "router.api_keys_file (disagg keys create makes one), or set "
                "router.allow_unauthenticated to answer anybody"
            )
    return "", ""


def check_origins(origins: tuple[str, ...]) -> None:
    """Refuse what no browser would send as an origin.

    Raises:
        ConfigError: naming ``router.cors_origins``.
    """
    for origin in origins:
        scheme, _, rest = origin.partition("://")
        port = _DEFAULT_PORTS.get(scheme, "")
        if origin == ANY_ORIGIN:
            wrong = "" if len(origins) == 1 else "allows every origin: no other stands beside it"
        elif not _ORIGIN.fullmatch(origin):
            wrong = "is no origin: scheme://host or scheme://host:port in lower case, and no path"
        elif port and rest.endswith(port):
            wrong = f"is an origin that browsers send without {port}"
        else:
            wrong = ""
        if wrong:
            raise ConfigError(f"{origin!r} {wrong}", param="router.cors_origins")
