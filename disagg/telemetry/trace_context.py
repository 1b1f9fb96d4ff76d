"""W3C trace context: how a span is named to another process."""

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()
_FIELD = "traceparent"
_EMPTY = context.Context()


def context_of(traceparent: str) -> context.Context:
    """The context whose current span is the one named; an empty one if the text names none."""
    # Where nothing is traced this is every request: W3C's parser need not look at nothing.
    return _W3C.extract({_FIELD: traceparent}, _EMPTY) if traceparent else _EMPTY


def traceparent_of(span: trace.Span) -> str:
    """The name of a span; "" of one that is not traced."""
    if not span.get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, _EMPTY))
    return carrier.get(_FIELD, "")
