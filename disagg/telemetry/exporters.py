"""Where the spans of a process go."""

from collections.abc import Mapping

from opentelemetry import trace

from disagg.errors import ConfigError

EXPORTERS = ("none", "console", "otlp")
VARIABLE = "OTEL_TRACES_EXPORTER"


def exporter_named_in(environ: Mapping[str, str], setting: str = "auto") -> str:
    """The setting, unless it is ``auto``: then what OpenTelemetry's variables say.

    That is ``OTEL_TRACES_EXPORTER``; where it is not set, ``otlp`` if an endpoint is, else
    ``none``; and ``none`` in any case where ``OTEL_SDK_DISABLED`` is true.
    """
    if setting != "auto":
        return setting
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "none"
    has_endpoint = any(
        environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("ENDPOINT", "TRACES_ENDPOINT")
    )
    return environ.get(VARIABLE) or ("otlp" if has_endpoint else "none")


def tracer_for(
    exporter: str, service: str, attributes: Mapping[str, str], endpoint: str = ""
) -> trace.Tracer:
    """A tracer that exports as the variables ``OTEL_*`` of OpenTelemetry set; one per process.

    Args:
        exporter: ``none``, ``console`` (standard output, a line of JSON per span) or ``otlp``
            (gRPC).
        service: ``service.name``, unless ``OTEL_SERVICE_NAME`` is set.
        attributes: of the resource, so of every span.
        endpoint: of the OTLP collector; "": that of ``OTEL_EXPORTER_OTLP_ENDPOINT``.

    Raises:
        ConfigError: the exporter is not known, or not installed.
    """
    if exporter == "none":
        return trace.NoOpTracer()
    if exporter not in EXPORTERS:
        raise ConfigError(
            f"{VARIABLE} is {exporter!r}; known are {', '.join(EXPORTERS)}", param=VARIABLE
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            ConsoleSpanExporter,
            SimpleSpanProcessor,
        )
    except ImportError as error:
        raise ConfigError(
            f"traces need the extra packages of disagg[tracing]: {error}", param=VARIABLE
        ) from error
    own = Resource({"service.name": service, **attributes})
    resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    if exporter == "console":
        one_line = ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(one_line))
    else:
        # Bounded by itself: what its queue has no room for is dropped, and nobody waits.
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint or None)))
    return provider.get_tracer("disagg")
