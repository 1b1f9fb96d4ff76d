"""What can be set of logs and traces."""

from typing import Literal

from disagg.config.fields import Section
from disagg.workers.options import AUTO


class TelemetrySettings(Section):
    """What router and workers say of themselves in logs and traces (docs/metrics.md)."""

    log_format: Literal["text", "json"] = "text"
    """Lines of the log: text for people, or json, one object per line with request ids, tenants and
    worker ids as fields.
    """
    log_requests: bool = False
    """The router logs a line per choice of a request that has ended: outcome, tokens, times,
    workers.
    """
    traces: Literal["auto", "none", "console", "otlp"] = AUTO
    """Where OpenTelemetry's spans go (extra disagg[tracing]): to a collector by OTLP over gRPC
    (otlp), to standard output (console), nowhere (none); auto: as the variables OTEL_* say.
    """
    traces_endpoint: str = ""
    """Of the collector, e.g. http://collector:4317; "": OTEL_EXPORTER_OTLP_ENDPOINT."""
