"""What operators see of a client's call: its metrics, its spans, its lines in the log.

One call is one request of a client, and one or several choices: each a request of the core's.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Self

from disagg.errors import CancelledError, DisaggError
from disagg.messages.outputs import FinishReason
from disagg.router.metrics import Metrics
from disagg.router.plain_metrics import Count
from disagg.router.request_spans import CallSpan, RequestSpans
from disagg.routing.actions import NewRequest
from disagg.routing.measurements import measure_end, measure_first_token
from disagg.routing.record import RequestRecord

logger = logging.getLogger(__name__)

CANCELLED = CancelledError.code
STOP, LENGTH = FinishReason.STOP.value, FinishReason.LENGTH.value
FINISHED = (STOP, LENGTH)


class Observers:
    """Who is told of calls.

    Args:
        log_requests: a line in the log per choice that has ended.

    Attributes:
        metrics: counted there.
        spans: traced there.
    """

    def __init__(self, metrics: Metrics, spans: RequestSpans, *, log_requests: bool) -> None:
        self.metrics, self.spans = metrics, spans
        self.log_requests = log_requests

    def call(
        self, name: str, operation: str, headers: Mapping[bytes, bytes], tenant: str
    ) -> "ObservedCall":
        """Observe a call of a tenant's, to the end of the context; it is counted once.

        Args:
            name: of its span.
            operation: ``gen_ai.operation.name``.
            headers: by lower-case name; they may name a span of the client's.
            tenant: whose call it is.
        """
        return ObservedCall(self, tenant, self.spans.call(name, operation, headers))


class ObservedCall:
    """A client's request while it is served: a context.

    It ends with its last choice, or with the first that fails; what is refused or cancelled ends
    when nobody serves it any more.

    Attributes:
        num_choices: that it will have; set before the first one begins.
        is_live: a choice was accepted, and the call has not ended.
        num_cached_tokens: of its prompts, as their first choices found them; those that have ended.
    """

    def __init__(self, observers: Observers, tenant: str, span: CallSpan) -> None:
        self.num_choices = 1
        self.is_live = False
        self.num_cached_tokens = 0
        self.observers = observers
        self.tenant = tenant
        self.span = span
        self._has_tokens = self._has_ended = False
        self._outcomes: list[str] = []
        self._received_ms: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DisaggError):
            self._end(error.code)  # counts unless it has ended
        elif self.is_live:
            self._end(CANCELLED)
        self.span.end(error)

    def began(self) -> None:
        """One of its choices was accepted."""
        if not self.is_live and not self._has_ended:
            self.is_live = True
            self.observers.metrics.accepted()

    def first_token(self, record: RequestRecord) -> None:
        """A prompt of it had its first token: now that prompt counts, once for all its choices."""
        first = measure_first_token(record)
        self.observers.metrics.prompt(first.sources, first.prefill_role, self.tenant)
        if not self._has_tokens:
            self._has_tokens = True
            self.observers.metrics.first_token(first)

    def choice_ended(self, outcome: str, record: RequestRecord) -> None:
        """A choice ended: ``stop``, ``length``, ``cancelled`` or an error's code."""
        if self._received_ms is None:
            self._received_ms = record.received_ms  # of the first one to begin or one like it
        self._received_ms = min(self._received_ms, record.received_ms)
        if outcome in FINISHED:
            self._outcomes.append(outcome)
            if len(self._outcomes) == self.num_choices:
                assert record.finished_ms is not None
                e2e_ms = max(0, record.finished_ms - self._received_ms)
                self._end(LENGTH if LENGTH in self._outcomes else STOP, e2e_ms)
        elif outcome != CANCELLED:  # else whoever cancelled it says why
            self._end(outcome)

    def _end(self, outcome: str, e2e_ms: int | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        metrics = self.observers.metrics
        if self.is_live:
            self.is_live = False
            metrics.released()
        metrics.ended(outcome, self.tenant)
        if e2e_ms is not None:
            metrics.finished(e2e_ms)


class ObservedChoice:
    """An accepted choice of a call, from its start to its end.

    Args:
        now_ms: of the router's clock.
        call: it belongs to.
        request: of the core's.
        shares_prompt: another choice has the same prompt, and counts it.

    Attributes:
        traceparent: trace context for the workers; "" where nothing is traced.
    """

    def __init__(
        self, now_ms: int, call: ObservedCall, request: NewRequest, *, shares_prompt: bool
    ) -> None:
        self._call = call
        self._request_id = request.request_id
        self._shares_prompt = shares_prompt
        self._span, self.traceparent = call.observers.spans.begin(now_ms, request, call.span)
        self._tokens: Count | None = None  # with the first ones: a tenant's series begins then
        self._waited = call.observers.metrics.tokens.waited
        self._delivered_s = 0.0
        call.began()

    def delivered(self, num_tokens: int, record: Callable[[str], RequestRecord]) -> None:
        """Tokens are on their way to the client; the record is looked at for the first ones."""
        if not num_tokens:
            return
        now_s = time.monotonic()
        if self._tokens is not None:
            self._waited(num_tokens, now_s - self._delivered_s)
        else:
            self._tokens = self._call.observers.metrics.delivered(self._call.tenant)
            if not self._shares_prompt:
                self._call.first_token(record(self._request_id))
        self._tokens.num += num_tokens
        self._delivered_s = now_s

    def ended(self, outcome: str, record: RequestRecord, error: str = "") -> None:
        """It has ended: ``stop``, ``length``, ``cancelled``, or an error's code and message."""
        observers, end = self._call.observers, measure_end(record)
        if outcome in FINISHED:
            observers.metrics.choice_finished(end)
        if not self._shares_prompt:
            self._call.num_cached_tokens += min(record.cached_tokens, record.num_prompt_tokens)
        self._call.choice_ended(outcome, record)
        observers.spans.end(self._span, self._call.span, outcome, record, error)
        if not (error or observers.log_requests):
            return
        fields = _fields(record, outcome, self._call.tenant, end.e2e_ms)
        if error:
            logger.warning("request %s failed: %s", record.request_id, error, extra=fields)
        else:
            shown = " ".join(f"{name}={value}" for name, value in fields.items())
            logger.info("request ended: %s", shown, extra=fields)


def _fields(record: RequestRecord, outcome: str, tenant: str, e2e_ms: int) -> dict[str, object]:
    """What a line in the log says of a choice that has ended."""
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "tenant": tenant,
        "outcome": outcome,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_tokens": record.num_tokens,
        "num_plans": len(record.generations),
        "e2e_ms": e2e_ms,
    }
    if record.generations:
        last = record.generations[-1]
        fields["prefill_worker"] = last.prefill.worker_id
        fields["decode_worker"] = last.decode.worker_id
    if record.first_token_ms is not None:
        fields["ttft_ms"] = record.first_token_ms - record.received_ms
    return fields
