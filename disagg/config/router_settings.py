"""What can be set of the router, and what a client may take of it."""

from typing import Self

from pydantic import (
    Field,
    model_validator,
)

from disagg.config.fields import Milliseconds, Port, Positive, Section
from disagg.errors import ConfigError
from disagg.router.kv_event_endpoints import parse_endpoints
from disagg.router.options import DEFAULT_POLICY, POLICY_NAMES, check_origins, why_exposed
from disagg.routing.fair_queue import parse_weights
from disagg.routing.revisions import parse_revision_weights


class RouterSettings(Section):
    """The HTTP front, the gRPC service and what they accept."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,63}$")
    """Of this replica, in workers' logs and records; "" takes the host's name. It need not be
    unique: each start makes an id of its own."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address that HTTP and gRPC bind to; others than loopback ones need API keys, and
    certificates (cluster.tls_directory) or cluster.allow_insecure.
    """
    http_port: Port = 8000
    """OpenAI-compatible HTTP; 0 takes any free port."""
    grpc_port: Port = 50051
    """Registration of workers, and generation for gRPC clients; 0 takes any free port."""
    admin_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the admin port binds to; others than loopback ones need API keys."""
    admin_port: Port = 8001
    """HTTP for operators: metrics, workers, records of requests, the reset of prefix caches; 0
    takes any free port."""
    api_keys_file: str = ""
    """File of API keys, hashed (disagg keys create). Where it is given, every caller needs a key;
    a change takes effect within seconds."""
    api_keys: str = Field(default="", repr=False)
    """What that file holds, as from a secret in DISAGG_ROUTER__API_KEYS; read at the start only."""
    allow_unauthenticated: bool = False
    """Without API keys answer whoever reaches the ports, on other addresses than loopback ones
    too."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Origins (https://chat.example) of web pages that may call the HTTP port from a browser, with
    an API key where there are keys; * for every one. Never the admin port."""
    processes: int = Field(default=1, ge=1, le=64)
    """Of this host, each a router of its own with a core of its own, on the same HTTP and gRPC
    ports; the admin port of number i is admin_port + i (docs/routers.md). A change takes effect
    when all of them start anew."""
    replans_max: int = Field(default=3, ge=0, le=100)
    """Tries after the first before a request fails."""
    request_timeout_ms: Milliseconds = 600_000
    """A request that stands still for so long fails with 504: no token, no report of a worker, no
    further part of its prompt computed, pulled or handed over."""
    comment_ms: int = Field(default=0, ge=0, le=3_600_000)
    """A stream that waits for its first token is sent a comment this often, which clients pass
    over, so that a proxy that ends silent connections keeps it (docs/limits.md). From the first one
    on its status is 200, and an error comes as an event. 0: none."""
    records_max: Positive = 1024
    """Finished requests whose record stays readable."""
    worker_silent_ms: Milliseconds = 10_000
    """A worker not heard of for so long is dropped. Time in which the router itself stood still
    does not count."""
    worker_silent_busy_ms: Milliseconds = 1_500
    """So is one that has work, already after this time, or after four times its longest silence of
    the last minutes if that is more, once others were heard since; its requests go on elsewhere."""
    worker_stalled_ms: Milliseconds = 20_000
    """Requests of a worker that says for so long that its step takes longer than
    scheduling.step_slow_ms go on at others that can do all of it, each once."""
    drain_timeout_ms: Milliseconds = 30_000
    """Asked to end by SIGTERM or Ctrl-C, the router refuses new requests (503), is not ready any
    more, and lets those that run end for so long; then they end with an error. A second signal ends
    it at once."""
    policy: str = DEFAULT_POLICY
    """Who prefills and who decodes (docs/policies.md): ``estimated`` weighs plans by their expected
    times; ``prefix_then_load`` hands over all that fits; ``local`` nothing; the rules of other
    systems: ``uncached_threshold``, ``prefill_load``, ``uncached_or_load``, ``cache_affinity``."""
    pull_tokens_min: Positive = 256
    """So many more tokens of prefix another worker must have to be pulled from."""
    decode_prefill_tokens_max: int = Field(default=512, ge=0)
    """A decode worker whose tiers have the prefix of a prompt loads it and serves the request alone
    if no more tokens are left to compute. 0: never."""
    uncached_tokens_max: int = Field(default=512, ge=0)
    """``uncached_threshold``, ``uncached_or_load``: a decode worker that lacks no more tokens of a
    prompt computes it itself."""
    uncached_share_max: float = Field(default=1.0, ge=0, le=1)
    """The same as a share of the prompt; both must be kept."""
    prefill_busy_tokens: int = Field(default=4096, ge=0)
    """``prefill_load``, ``uncached_or_load``: where more tokens wait at every prefill worker,
    decode workers compute prompts."""
    decode_busy_share: float = Field(default=0.9, ge=0, le=1)
    """Not those with a larger share of their blocks in use."""
    affinity_weight: float = Field(default=1.0, ge=0, le=1000, allow_inf_nan=False)
    """``cache_affinity``: what an uncached token counts for, beside one that waits."""
    others_weight: float = Field(default=1.0, ge=0, le=1000, allow_inf_nan=False)
    """``estimated``: what a millisecond counts for by which others are held up, beside one of the
    request's own."""
    slo_ttft_ms: int = Field(default=0, ge=0, le=3_600_000)
    """From a request's arrival to its first token; ``estimated`` prefers plans that keep it. 0:
    none. A request may say its own (docs/policies.md)."""
    slo_tpot_ms: float = Field(default=0, ge=0, le=60_000, allow_inf_nan=False)
    """Mean time per token after it, of the request and of those whom a plan would disturb; 0:
    none."""
    slo_shed: bool = False
    """Answer 429 with Retry-After where no plan is expected to keep slo_ttft_ms."""
    accept_unlike_workers: bool = False
    """Workers that exchange no KV with the others of their revision (another engine, another
    layout's release) are taken in and serve requests alone. Else they are refused when they
    register, and told why."""
    revision_weights: tuple[str, ...] = Field(default=(), strict=False)
    """NAME=WEIGHT: a revision's part of the new requests, 0 for none, as it is for those not named
    here. Empty: all that have workers get the same. At run time: disagg revisions set."""
    kv_event_endpoints: tuple[str, ...] = Field(default=(), strict=False)
    """Servers that are no workers, plain vLLM ones for instance, whose KV events are followed:
    NAME=ADDRESS[?replay=ADDRESS][&tenant=NAME] each, ZeroMQ addresses as tcp://HOST:PORT. gRPC
    Match tells what they hold of a prompt; no request goes there (docs/followed-caches.md)."""
    kv_event_block_tokens: Positive = 16
    """Tokens by which their blocks are named; must divide the block size of each of them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ports = {"http_port": self.http_port}
        for name, port in (("grpc_port", self.grpc_port), ("admin_port", self.admin_port)):
            same = [f"router.{other}" for other, taken in ports.items() if port and port == taken]
            if same:
                raise ValueError(f"{name}: must differ from {same[0]}")
            ports[name] = port
        last = self.admin_port + self.processes - 1
        taken = [p for p in (self.http_port, self.grpc_port) if self.admin_port < p <= last]
        if self.admin_port and (taken or last > 65_535):
            raise ValueError(
                f"processes: each needs an admin port of its own, {self.admin_port} to {last}, "
                + (f"and {taken[0]} is taken" if taken else "of at most 65535")
            )
        if self.api_keys_file and self.api_keys:
            raise ValueError("api_keys: there is router.api_keys_file already")
        at_fault, why = why_exposed(
            self.host,
            self.admin_host,
            has_keys=bool(self.api_keys_file or self.api_keys),
            allow_unauthenticated=self.allow_unauthenticated,
        )
        if why:
            raise ValueError(f"{at_fault}: {why}")
        try:
            parse_revision_weights(self.revision_weights)
        except ConfigError as error:
            raise ValueError(f"revision_weights: {error.message}") from None
        try:
            check_origins(self.cors_origins)
        except ConfigError as error:
            raise ValueError(f"cors_origins: {error.message}") from None
        try:
            parse_endpoints(self.kv_event_endpoints)
        except ConfigError as error:
            raise ValueError(f"kv_event_endpoints: {error.message}") from None
        if self.policy not in POLICY_NAMES:
            known = ", ".join(POLICY_NAMES)
            raise ValueError(f"policy: {self.policy!r} is not known; known: {known}")
        return self


class LimitSettings(Section):
    """What one connection, request, key or tenant may take of the router (docs/limits.md)."""

    connections_max: Positive = 4096
    """HTTP connections; one more takes the place of the one that is idle for longest, and is
    answered 503 and closed where none is for a second. Requests of one tenant, or without keys of
    one address, may hold 15/16 of them; one more is answered 429 and closed."""
    header_bytes_max: int = Field(default=16 << 10, ge=1024, le=1 << 20)
    """Request line and headers; more are answered 431."""
    headers_max: int = Field(default=100, ge=8, le=10_000)
    """Headers of a request; more are answered 431."""
    body_bytes_max: int = Field(default=32 << 20, ge=1024)
    """A request's body; a larger one is answered 413."""
    receive_timeout_ms: Milliseconds = 20_000
    """A connection that is idle or has not sent a whole head for so long is closed; a body that
    stands still for so long is answered 408."""
    receive_bytes_per_s_min: int = Field(default=4096, ge=0)
    """A body that comes slower on average, after receive_timeout_ms, is answered 408. 0: any."""
    send_timeout_ms: Milliseconds = 30_000
    """A client that takes nothing of what it was sent for so long is cut off."""
    send_bytes_per_s_min: int = Field(default=1024, ge=0)
    """So is one that takes it slower on average, after send_timeout_ms. 0: any."""
    send_buffer_bytes: int = Field(default=128 << 10, ge=4096, le=1 << 30)
    """Bytes of an answer that wait in the router's memory for a client that reads slowly."""
    unread_tokens_max: Positive = 2048
    """Tokens of an answer, all its choices together, that may wait behind them; one more, and its
    generations are cancelled, their KV freed."""
    prompt_bytes_max: Positive = 8 << 20
    """A prompt's text, checked before it is tokenised. A chat template writes so many characters at
    most."""
    prompt_tokens_max: int = Field(default=0, ge=0)
    """A prompt's tokens; 0: as many as the largest worker that is ready can serve."""
    generation_tokens_max: Positive = 1 << 20
    """Sum of max_tokens over the choices of a request."""
    prompt_logprobs_max: Positive = 262_144
    """Log-probabilities that a request may ask for of a prompt: its tokens times one and the number
    of best tokens at each. A list of prompts, and all requests together, may have eight times as
    many."""
    requests_max: Positive = 1024
    """Live requests, waiting ones included. Of more the tenant with the longest queue loses its
    newest; a new request of that tenant is answered 429. One tenant may have 15/16 of them."""
    choices_max: Positive = 256
    """Choices of a request: its prompts times n or best_of. Each is one of the live requests; all
    are accepted, or none."""
    streams_per_key_max: Positive = 1024
    """Requests in progress of one API key, or without keys of one address, each with all its
    choices; more are answered 429."""
    observers_max: int = Field(default=16, ge=1, le=1024)
    """Who may follow the events of the live page at a time; one more is answered 429."""
    worker_prefill_tokens_max: Positive = 16_384
    """While so many tokens of prompts are still to be computed at a worker, it is given no more
    requests. What has no room anywhere waits at the router, where tenants take turns in tokens."""
    worker_waiting_max: int = Field(default=16, ge=0)
    """Requests at a worker beyond the scheduling.max_sequences that it runs at once; then
    likewise."""
    tenant_weights: tuple[str, ...] = Field(default=(), strict=False)
    """NAME=WEIGHT: a tenant's part of the tokens where requests wait; 1 where none is given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            parse_weights(self.tenant_weights)
        except ConfigError as error:
            raise ValueError(f"tenant_weights: {error.message}") from None
        return self
