"""Trace spans of the router: one per call, and one per choice in it, which workers go on from.

Attributes ``gen_ai.*`` are OpenTelemetry's for generative models; ``gen_ai.latency.*`` are vLLM's,
in seconds.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from disagg.errors import DisaggError
from disagg.routing.actions import NewRequest
from disagg.routing.measurements import measure_end, measure_first_token
from disagg.routing.record import RequestRecord
from disagg.telemetry.span_clock import SpanClock
from disagg.telemetry.trace_context import context_of, traceparent_of

TRACEPARENT = b"traceparent"
SYSTEM = "disagg"


class CallSpan:
    """The span of one call of a client, until it is ended.

    Attributes:
        clock: of this span and those of the call's choices.
        operation: ``gen_ai.operation.name``.
        traceparent: of the span that those that follow are children of; "": of none.
    """

    __slots__ = ("_span", "clock", "operation", "traceparent")

    def __init__(self, span: Span, operation: str, traceparent: str, clock: SpanClock) -> None:
        self._span = span
        self.clock = clock
        self.operation = operation
        self.traceparent = traceparent

    def end(self, error: BaseException | None) -> None:
        """Nobody serves the call any more; an error that it ended by is told of."""
        if isinstance(error, DisaggError):
            self._span.set_attribute("error.type", error.code)
            if error.http_status >= 500:  # a client's mistake is no fault of the server's
                self._span.set_status(StatusCode.ERROR, error.message)
        self._span.end(self.clock.now_ns())


class RequestSpans:
    """Begins and ends the router's spans. With a tracer that does nothing it passes names on."""

    def __init__(self, tracer: trace.Tracer, model_name: str) -> None:
        self._tracer = tracer
        self._is_idle = isinstance(tracer, trace.NoOpTracer)
        self._model_name = model_name

    def call(self, name: str, operation: str, headers: Mapping[bytes, bytes]) -> CallSpan:
        """The span of one call, below the client's if its head names one."""
        given = headers.get(TRACEPARENT, b"").decode("latin-1")
        clock = SpanClock()
        if self._is_idle and not given:
            return CallSpan(INVALID_SPAN, operation, "", clock)
        span = self._tracer.start_span(
            name, context_of(given), SpanKind.SERVER, start_time=clock.began_ns
        )
        span.set_attribute("gen_ai.operation.name", operation)
        return CallSpan(span, operation, traceparent_of(span) or given, clock)

    def begin(self, now_ms: int, request: NewRequest, call: CallSpan) -> tuple[Span, str]:
        """Begin a choice; returns its span and the trace context for workers.

        Its start is told by how long ago it was: the router's clock, of ``now_ms`` and of requests,
        may be far from that of spans since somebody set it.
        """
        if self._is_idle and not call.traceparent:
            return INVALID_SPAN, ""
        waited_ms = 0 if request.received_ms is None else now_ms - request.received_ms
        span = self._tracer.start_span(
            f"{call.operation} {self._model_name}",
            context_of(call.traceparent),
            start_time=call.clock.now_ns() - waited_ms * 1_000_000,
        )
        if span.is_recording():
            sampling = request.sampling
            asked: dict[str, AttributeValue] = {
                "gen_ai.operation.name": call.operation,
                "gen_ai.provider.name": SYSTEM,
                "gen_ai.request.model": self._model_name,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "disagg.request_id": request.request_id,
                "disagg.tenant": request.tenant,
            }
            span.set_attributes(asked)
        return span, traceparent_of(span) or call.traceparent

    def end(
        self, span: Span, call: CallSpan, outcome: str, record: RequestRecord, error: str = ""
    ) -> None:
        """A choice ended: ``stop``, ``length``, ``cancelled`` or an error's code."""
        if span.is_recording():
            span.set_attributes(_ended(record, outcome))
            if error:
                span.set_attribute("error.type", outcome)
                span.set_status(StatusCode.ERROR, error)
        span.end(call.clock.now_ns())


def _ended(record: RequestRecord, outcome: str) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [outcome],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "disagg.num_plans": len(record.generations),
    }
    if record.generations:
        last = record.generations[-1]
        found["disagg.prefill_worker"] = last.prefill.worker_id
        found["disagg.decode_worker"] = last.decode.worker_id
    if record.first_token_ms is not None:
        first = measure_first_token(record)
        found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
        found["gen_ai.latency.time_to_first_token"] = first.ttft_ms / 1000
        found["gen_ai.latency.time_in_queue"] = first.queue_ms / 1000
        found["gen_ai.latency.time_in_model_prefill"] = first.prefill_ms / 1000
    found["gen_ai.latency.e2e"] = measure_end(record).e2e_ms / 1000
    return found
