"""What holds at every moment of every simulated world, whatever befalls it.

Load stays within its limits. Every wait has a bound, and progress renews it: who stands still for
longer is given up with a reason, and who gets on is not. The world sees progress where it happens,
in steps, READs and deliveries, and not in what the cores tell each other of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from disagg.errors import DisaggError, ExpiredError, InvariantViolation
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams, TokenLogprobs
from disagg.messages.session import EndReason, PartEnded
from disagg.routing.actions import Deliver
from disagg.routing.core import RouterCore
from disagg.routing.request_lifecycle import AHEAD_MAX
from disagg.scheduling.step import Step
from disagg.testing.simulation.config import FaultKind, SimulationConfig
from disagg.testing.simulation.symbolic_engine import expected_scores, expected_tokens

SLACK_MS = 100
"""Messages on their way."""
SHOWN_MS = 1_000
"""Progress is shown to others that seldom."""


@dataclass(slots=True)
class Client:
    """What one request asked for and got."""

    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    is_scored: bool = False
    """It asks for log-probabilities of its prompt."""
    received: list[int] = field(default_factory=list)
    scores: tuple[TokenLogprobs | None, ...] = ()
    outcome: str = ""
    """Empty while it runs; then finished, cancelled, or the error."""
    asked_ms: int = 0
    ended_ms: int = 0
    progress_ms: int = 0
    """When it last got on: a plan, a token, a report, or more of its prompt than ever since."""
    handover_ms: int | None = None
    """When a step or a READ of its current generation last ended."""
    generation: int = 0
    num_computed: int = 0

    @property
    def sampling(self) -> SamplingParams:
        """What it asks for."""
        if not self.is_scored:
            return SamplingParams(self.max_tokens)
        return SamplingParams(
            self.max_tokens, num_prompt_logprobs=1, num_prompt_tokens=len(self.prompt)
        )

    def take(self, delta: Deliver) -> None:
        """Something arrives; what was asked for of the prompt with the first of it, and once."""
        is_first = self.is_scored and not self.scores
        assert bool(delta.prompt_logprobs) == is_first, f"{delta} for {self}"
        self.scores += delta.prompt_logprobs
        self.received += delta.token_ids

    def check(self, request_id: str, config: SimulationConfig) -> None:
        """Verify tokens and log-probabilities, of what has not finished as far as they came."""
        prompt, vocab_size = self.prompt, config.vocab_size
        got = self.received
        expected = expected_tokens(config.layout, prompt, self.max_tokens, vocab_size)
        assert got == expected[: len(got)], f"{request_id}: {got} is not {expected}"
        assert self.outcome != "finished" or got == expected, f"{request_id} ended early"
        if self.scores:
            scores = expected_scores(config.layout, prompt, vocab_size)
            assert self.scores == scores, f"{request_id}: {self.scores} is not {scores}"
        assert self.outcome != "finished" or self.is_scored == bool(self.scores), request_id


def check_step(step: Step, config: SimulationConfig) -> int:
    """Verify the size of a batch; returns its tokens.

    Raises:
        InvariantViolation: more sequences or tokens than a step may have.
    """
    num_tokens = sum(len(part.token_ids) for part in step.slices)
    if len(step.slices) > config.max_sequences or num_tokens > config.max_step_tokens:
        raise InvariantViolation(f"a step of {len(step.slices)} sequences, {num_tokens} tokens")
    return num_tokens


def check_router(router: RouterCore, config: SimulationConfig) -> None:
    """Verify the bounds of the router's tables.

    Raises:
        InvariantViolation: too many requests, or too many tokens wait for one before them.
    """
    if router.num_live > config.requests_max:
        raise InvariantViolation(f"{router.num_live} requests, at most {config.requests_max}")
    for request in router._live:
        if request.stream.num_ahead > AHEAD_MAX:
            raise InvariantViolation(f"{request.request_id}: {request.stream.num_ahead} ahead")


class Patience:
    """Follows when each request last got on, and holds the cores to it."""

    def __init__(self, config: SimulationConfig, clients: Mapping[str, Client]) -> None:
        self._config = config
        self._clients = clients
        lossy = {FaultKind.KILL, FaultKind.LOSE, FaultKind.CUT, FaultKind.EXPIRE}
        self._lossy = (
            config.num_kills + config.num_cuts + config.read_errors_per_mille > 0
            or bool(config.failing_reads)
            or any(fault.kind in lossy for fault in config.faults)
        )

    # --- progress

    def planned(self, now_ms: int, key: RequestKey) -> None:
        """A generation begins."""
        client = self._clients[key.request_id]
        client.generation, client.num_computed = key.generation, 0
        client.progress_ms, client.handover_ms = now_ms, None

    def delivered(self, now_ms: int, request_id: str) -> None:
        """The client got tokens."""
        client = self._clients[request_id]
        client.progress_ms, client.num_computed = now_ms, 0

    def reported(self, now_ms: int, key: RequestKey) -> None:
        """A worker reports a prefill or a transfer."""
        if client := self._current(key):
            client.progress_ms = now_ms

    def computed(self, now_ms: int, key: RequestKey, num_tokens: int) -> None:
        """A step has computed so many positions."""
        if client := self._current(key):
            client.handover_ms = now_ms
            if num_tokens > client.num_computed:
                client.num_computed, client.progress_ms = num_tokens, now_ms

    def has_read(self, now_ms: int, key: RequestKey) -> None:
        """A READ has ended well."""
        if client := self._current(key):
            client.handover_ms = client.progress_ms = now_ms

    # --- what must follow

    def check(self, now_ms: int) -> None:
        """Verify that nobody stands still without an error.

        Raises:
            InvariantViolation: somebody has stood still for longer than the router's patience.
        """
        bound_ms = self._config.request_timeout_ms + 2 * self._config.tick_ms + SLACK_MS
        for request_id, client in self._clients.items():
            if not client.outcome and now_ms - client.progress_ms > bound_ms:
                waited_ms = now_ms - client.progress_ms
                raise InvariantViolation(f"{request_id} stands still for {waited_ms} ms")

    def failed(self, now_ms: int, request_id: str, error: DisaggError) -> None:
        """A request fails: for want of patience only if it stood still.

        Raises:
            InvariantViolation: it got on.
        """
        waited_ms = now_ms - self._clients[request_id].progress_ms
        bound_ms = self._config.request_timeout_ms - SHOWN_MS - SLACK_MS
        if isinstance(error, ExpiredError) and waited_ms < bound_ms:
            raise InvariantViolation(f"{request_id} got on {waited_ms} ms ago: {error}")

    def part_ended(self, now_ms: int, ended: PartEnded) -> None:
        """A worker's part ends: for want of patience only if the hand-over stood still.

        Raises:
            InvariantViolation: it went on, and nothing was lost that could have shown it.
        """
        ttl_ms = {
            EndReason.LEASE_DEAD: self._config.lease_ttl_ms,
            EndReason.EXPIRED: self._config.reservation_ttl_ms,
        }.get(ended.reason)
        client = self._current(ended.key)
        if self._lossy or ttl_ms is None or client is None or client.handover_ms is None:
            return
        waited_ms = now_ms - client.handover_ms
        if waited_ms < ttl_ms - min(SHOWN_MS, ttl_ms // 4) - SLACK_MS:
            raise InvariantViolation(f"{ended} {waited_ms} ms after it went on")

    def _current(self, key: RequestKey) -> Client | None:
        client = self._clients[key.request_id]
        return client if client.generation == key.generation and not client.outcome else None
