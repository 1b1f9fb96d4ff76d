"""Where spans go, by setting and environment."""

import pytest

from disagg.errors import ConfigError
from disagg.telemetry.exporters import exporter_named_in, tracer_for


@pytest.mark.parametrize(
    ("environ", "exporter"),
    [
        ({}, "none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, "otlp"),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "console"}, "none"),
        (
            {
                "OTEL_TRACES_EXPORTER": "console",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
            },
            "console",
        ),
    ],
)
def test_the_exporter_follows_opentelemetrys_variables(
    environ: dict[str, str], exporter: str
) -> None:
    assert exporter_named_in(environ) == exporter
    assert exporter_named_in(environ, "none") == "none"


def test_an_unknown_exporter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER is 'jaeger'; known are none") as e:
        tracer_for("jaeger", "disagg-worker", {})
    assert e.value.param == "OTEL_TRACES_EXPORTER"
    assert not tracer_for("none", "disagg-worker", {}).start_span("x").is_recording()
