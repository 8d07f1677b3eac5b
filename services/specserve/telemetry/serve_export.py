"""Ray Serve's own spans, of its proxies and handles: sent where ours go, and as often.

Serve traces once these variables are set on every Ray process, proxies included; it calls
`span_processors` in each. Knows the names of variables; imports no Ray.
"""

from __future__ import annotations

import os

from opentelemetry.sdk.trace import SpanProcessor

from specserve.telemetry.tracing import (
    ENDPOINT,
    EXPORT_TIMEOUT_S,
    SAMPLE_RATIO,
    number_from_environment,
)

EXPORTER = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"
RATIO = "RAY_SERVE_TRACING_SAMPLING_RATIO"
SERVICE_NAME = "OTEL_SERVICE_NAME"

EXPORTER_PATH = "specserve.telemetry.serve_export:span_processors"


def span_processors() -> list[SpanProcessor]:
    """Make the processors of one Serve process; none where nothing is to be exported."""
    if not os.environ.get(ENDPOINT):
        return []
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    return [BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S))]


def serve_environment() -> dict[str, str]:
    """Return what Ray's processes must have so that Serve traces as we do; empty without tracing.

    What is set already stays.

    Raises:
        ConfigurationError: the ratio is no number in [0, 1].
    """
    if not os.environ.get(ENDPOINT):
        return {}
    # Serve's own default keeps one request in a hundred, and would decide for all that follows.
    ratio = number_from_environment(SAMPLE_RATIO, 1.0, most=1.0)
    wanted = {EXPORTER: EXPORTER_PATH, RATIO: f"{ratio:g}", SERVICE_NAME: "specserve-proxy"}
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}
