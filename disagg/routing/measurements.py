"""What metrics and traces say of one request, computed from its record."""

from disagg.messages.frozen import dataclass
from disagg.messages.reports import PrefillTimes
from disagg.routing.estimates.estimate import Estimate
from disagg.routing.record import GenerationRecord, RequestRecord

TPOT_TOKENS_MIN = 8
"""Milliseconds say little of the time per token of a shorter answer."""
NOTHING_MEASURED = PrefillTimes(0, 0, 0)


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Where the KV of a prompt came from; the three add up to its tokens.

    A prompt counts once, by the prefill that led to its first token: what other plans computed
    before or after it, and what the decode worker then pulled of it, is work, no prompt.
    """

    local_compute: int
    local_cache_hit: int
    """Cached by the worker that prefilled, in its pool or in a tier of its."""
    external_kv_transfer: int
    """Pulled by it from another worker's cache."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.local_compute + self.local_cache_hit + self.external_kv_transfer


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to the first token in its four parts, in ms, and what the prompt took."""

    queue_ms: int
    """Waiting for room at the router, then for its turn at the worker."""
    prefill_ms: int
    """Computed there, up to the first token."""
    transfer_ms: int
    """Reservation at the decode worker; prefix from another worker or from a tier."""
    router_ms: int
    """All the rest: the request prepared and planned, messages on their way, plans given up."""
    sources: PromptSources
    prefill_role: str
    estimate_ratio: float | None = None
    """Expected over taken, from the plan to the first token; None: not expected, or planned anew.
    """

    @property
    def ttft_ms(self) -> int:
        """From the request's arrival to its first token: the four parts together."""
        return self.queue_ms + self.prefill_ms + self.transfer_ms + self.router_ms


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The times of a request that has ended, in ms."""

    e2e_ms: int
    """From its arrival."""
    decode_ms: int | None
    """From its first token to its end; None where it had none."""
    time_per_output_token_ms: float | None
    """Mean over the tokens after the first; None where there are none."""
    decode_role: str
    """"" where it was never planned."""
    estimate_ratio: float | None = None
    """Time per token, expected over taken; None as in `FirstToken`, and for short answers."""


def measure_first_token(record: RequestRecord) -> FirstToken:
    """Split the time to the first token of a request that has just had it.

    Workers measure with clocks of their own: what they report is cut to the time that passed here,
    so the parts always add up.
    """
    assert record.first_token_ms is not None
    current = record.generations[-1]
    times = current.prefill_times or NOTHING_MEASURED
    left = max(0, record.first_token_ms - record.received_ms)
    prefill = min(times.compute_ms, left)
    transfer = min(times.transfer_ms, left - prefill)
    at_router = max(0, record.generations[0].started_ms - record.submitted_ms)
    queue = min(at_router + times.queue_ms, left - prefill - transfer)
    return FirstToken(
        queue_ms=queue,
        prefill_ms=prefill,
        transfer_ms=transfer,
        router_ms=left - prefill - transfer - queue,
        sources=_sources(record.num_prompt_tokens, current),
        prefill_role=current.prefill_role,
        estimate_ratio=_ttft_ratio(record),
    )


def measure_end(record: RequestRecord) -> RequestEnd:
    """The times of a request that has ended."""
    assert record.finished_ms is not None
    decode, per_token = None, None
    if record.first_token_ms is not None:
        decode = max(0, record.finished_ms - record.first_token_ms)
        if record.num_tokens > 1:
            per_token = decode / (record.num_tokens - 1)
    return RequestEnd(
        e2e_ms=max(0, record.finished_ms - record.received_ms),
        decode_ms=decode,
        time_per_output_token_ms=per_token,
        decode_role=record.generations[-1].decode_role if record.generations else "",
        estimate_ratio=_tpot_ratio(record, per_token),
    )


def _ttft_ratio(record: RequestRecord) -> float | None:
    estimate = _only_estimate(record)
    if estimate is None or record.first_token_ms is None:
        return None
    taken_ms = record.first_token_ms - record.generations[0].started_ms
    return estimate.ttft_ms / max(1, taken_ms)


def _tpot_ratio(record: RequestRecord, per_token_ms: float | None) -> float | None:
    estimate = _only_estimate(record)
    if estimate is None or not per_token_ms or record.num_tokens < TPOT_TOKENS_MIN:
        return None
    return (estimate.tpot_ms + estimate.handover_ms / (record.num_tokens - 1)) / per_token_ms


def _only_estimate(record: RequestRecord) -> Estimate | None:
    """Of what was planned once; what is planned anew was expected under other circumstances."""
    return record.generations[0].estimate if len(record.generations) == 1 else None


def _sources(num_tokens: int, current: GenerationRecord) -> PromptSources:
    """By the worker's report; by the plan where the worker was lost before it could report."""
    hit, pulled = current.hit_tokens, current.pulled_tokens
    if hit is None or pulled is None:
        hit, pulled = current.expected_hit_tokens, 0
    hit = min(hit, num_tokens)
    pulled = min(pulled, num_tokens - hit)
    return PromptSources(num_tokens - hit - pulled, hit, pulled)
