"""W3C trace context: how a span is named to another process."""

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()
_FIELD = "traceparent"


def context_of(traceparent: str) -> context.Context:
    """The context whose current span is the one named; an empty one if the text names none."""
    return _W3C.extract({_FIELD: traceparent}, context.Context())


def traceparent_of(span: trace.Span) -> str:
    """The name of a span; "" of one that is not traced."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, context.Context()))
    return carrier.get(_FIELD, "")
